"""Wait for answers of workers with a deadline. Errors name the worker and the reason.

        gather --ray.wait--> first answer --> keep the result, continue
                                          |-> first failure --> short wait for its root cause --> raise; other calls are
                                          not awaited
                     `-> deadline -------> stacks of all workers ----------> raise

Invariant: every wait ends, and a rank's failure is raised while other ranks still hang.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from nemo_rl.distributed.cluster.local_ray import LIVENESS_PERIOD_S, check_local_ray
from nemo_rl.distributed.cluster.node_health import describe_losses
from nemo_rl.distributed.workers.logs import stacks_of, stopped_among, tail_of_logs
from nemo_rl.distributed.workers.process import WorkerIdentity
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.errors import DeadlineExceededError, NodeLostError, WorkerDiedError

# # When a worker dies, its peers may report a broken connection before Ray reports the death.
WORKER_DEATHS = (RayActorError, OutOfMemoryError)
"""Ray's errors for calls to a dead process. `OutOfMemoryError` means that the machine's memory was full."""
_FULL_MEMORY = re.compile(r"Memory on the node \(IP: ([^,)]+)[^)]*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
ROOT_CAUSE_GRACE_S = 2.0
_TOGETHER_S = 50e-6
"""Seconds per open call to wait for further answers after the first one. The time of a wait grows with the number of
open calls, so separate waits for all answers would take quadratic time."""


@dataclass(frozen=True)
class WorkerSlot:
    """A worker as its group sees it, with an identity when its process runs."""

    name: str
    rank: int
    handle: Any
    is_async: bool = False
    identity: WorkerIdentity | None = None

    def __str__(self) -> str:
        return str(self.identity or f"{self.name} (rank {self.rank}, process not started yet)")


@dataclass(frozen=True)
class PendingCall:
    """A call without an answer, with the called worker."""

    ref: Any
    slot: WorkerSlot


def gather(
    calls: Sequence[PendingCall],
    workers: Sequence[WorkerSlot],
    timeout_s: float,
    phase: str,
    arrivals: dict[int, float] | None = None,
) -> list[Any]:
    """Wait for all answers.

    Args:
        calls: calls to wait for.
        workers: all workers of the group. If the deadline passes, their stacks are shown. If a call fails, their nodes
            are checked.
        timeout_s: seconds from now.
        phase: name of the wait for errors.
        arrivals: gets the time (`time.monotonic()`) of each worker's answer, by rank; None: the times are not kept.

    Returns:
        The answers in the order of `calls`.

    Raises:
        DeadlineExceededError: some worker did not answer in time.
        NodeLostError: the machine of a worker of the group is lost.
        WorkerDiedError: some worker's process ended.
        RayDiedError: the local Ray ended.
        Exception: an error that a worker raised, with a note that names the worker and the remote
            traceback as its cause.
    """
    end = time.monotonic() + timeout_s
    waiting = {call.ref: call for call in calls}
    ranks = {call.ref: call.slot.rank for call in calls}
    answers: dict[Any, Any] = {}
    with StillWaiting(phase, "workers have answered", lambda: len(answers), len(calls)) as progress:
        while waiting:
            failures = _take_ready(waiting, answers, end, progress.look)
            if failures is None:
                raise _deadline_error(list(waiting.values()), calls, workers, timeout_s, phase)
            if failures:
                raise _root_cause(failures, waiting, workers, phase)
            if arrivals is not None:
                now = time.monotonic()
                arrivals |= {ranks[ref]: now for ref in islice(answers, len(arrivals), None)}
    return [answers[call.ref] for call in calls]


def full_memory(error: BaseException) -> str | None:
    """Return a message if Ray ended a process because its machine's memory was full. Return None for other errors.

    Ray's own report has 60 lines, with the command lines of programs of other users.
    """
    found = _FULL_MEMORY.search(str(error))
    if found is None:
        return None
    address, used, size = found.groups()
    return (
        f"the memory of the machine {address} was full, {used} of {size} GB were used by all programs together, so Ray "
        "ended the process. End other programs there, give the run less to hold, or use a machine with more memory."
    )


def explain_failure(error: RayError, slot: WorkerSlot, phase: str) -> Exception:
    """Convert Ray's error of a worker's call to the error that is shown.

    Returns:
        The worker's own exception (a note names the worker, its cause is the remote traceback), or
        a `WorkerDiedError` with the worker's last log lines, or a `NodeLostError`.
    """
    if isinstance(error, RayTaskError):
        own = error.cause if isinstance(error.cause, Exception) else error
        if own is not error:
            own.__cause__ = error
        own.add_note(f"Raised in worker {slot} during {phase!r}.")
        return own
    losses = describe_losses([slot.identity] if slot.identity else [])
    if losses:
        return NodeLostError(f"{losses}\nSeen during {phase!r}.")
    full = full_memory(error)
    if full:
        return WorkerDiedError(f"Worker {slot} died during {phase!r}: {full}")
    logs = tail_of_logs(slot.identity) if slot.identity else "Its process never reported itself."
    reason = " ".join(str(error).split())
    return WorkerDiedError(f"Worker {slot} died during {phase!r}.\n{logs}\nRay says: {reason}")


def _take_ready(
    waiting: dict[Any, PendingCall], answers: dict[Any, Any], end: float, look: Callable[[], None] = lambda: None
) -> list[tuple[PendingCall, RayError]] | None:
    """Move available answers from `waiting` to `answers`.

    Returns:
        The calls that failed, or None if no answer came before `end`.
    """
    refs = list(waiting)
    ready: list[Any] = []
    while not ready:
        check_local_ray()
        look()
        left = end - time.monotonic()
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(max(left, 0.0), LIVENESS_PERIOD_S))
        if not ready and left <= 0:
            return None
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_TOGETHER_S * len(refs))
    calls = {ref: waiting.pop(ref) for ref in ready}
    try:
        answers |= zip(ready, ray.get(ready), strict=True)
    except RayError:
        failures = _take_each(calls, answers)
        check_local_ray()
        return failures
    return []


def _take_each(calls: Mapping[Any, PendingCall], answers: dict[Any, Any]) -> list[tuple[PendingCall, RayError]]:
    """Add available answers to `answers`, and return the calls that failed."""
    failures = []
    for ref, call in calls.items():
        try:
            answers[ref] = ray.get(ref)
        except RayError as error:
            failures.append((call, error))
    return failures


def _root_cause(
    failures: list[tuple[PendingCall, RayError]],
    waiting: dict[Any, PendingCall],
    workers: Sequence[WorkerSlot],
    phase: str,
) -> Exception:
    end = time.monotonic() + ROOT_CAUSE_GRACE_S
    while waiting and not any(isinstance(error, WORKER_DEATHS) for _, error in failures):
        more = _take_ready(waiting, {}, end)
        if more is None:
            break
        failures = failures + more
    deaths_first = sorted(failures, key=lambda failure: isinstance(failure[1], RayTaskError))
    losses = describe_losses([slot.identity for slot in workers if slot.identity])
    if losses:
        shown: Exception = NodeLostError(f"{losses}\nSeen during {phase!r}.")
        others = deaths_first
    else:
        (call, error), *others = deaths_first
        shown = explain_failure(error, call.slot, phase)
    for other_call, other_error in others:
        last_line = full_memory(other_error) or str(other_error).strip().splitlines()[-1]
        shown.add_note(f"Worker {other_call.slot} failed too: {last_line}")
    return shown


def _deadline_error(
    late: Sequence[PendingCall],
    calls: Sequence[PendingCall],
    workers: Sequence[WorkerSlot],
    timeout_s: float,
    phase: str,
) -> DeadlineExceededError:
    names = ", ".join(str(call.slot) for call in late)
    known = [slot.identity for slot in workers if slot.identity]
    stopped = ", ".join(str(worker) for worker in stopped_among(known))
    cause = f" Stopped (SIGSTOP) are {stopped}; the others may wait for them." if stopped else ""
    parts = [
        f"{phase!r} did not finish within {timeout_s:g} s: no answer from {len(late)} of {len(calls)} workers: "
        f"{names}.{cause}"
    ]
    if known:
        parts.append(stacks_of(known))
    if len(known) < len(workers):
        parts.append(
            f"Processes not started: {len(workers) - len(known)} of {len(workers)}. Free in the cluster: "
            f"{ray.available_resources()}."
        )
    parts.extend(_waiting_coroutines([call.slot for call in late]))
    return DeadlineExceededError("\n".join(parts))


def _waiting_coroutines(slots: Sequence[WorkerSlot]) -> list[str]:
    """Describe where coroutines of asynchronous workers wait, if the workers' event loops still answer."""
    asked = {slot.handle.describe_coroutines.remote(): slot for slot in slots if slot.is_async}
    if not asked:
        return []
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=5.0)
    parts = []
    for ref in ready:
        try:
            parts.append(f"Coroutines of {asked[ref]}:\n{ray.get(ref)}")
        except RayError as error:
            parts.append(f"Coroutines of {asked[ref]}: {type(error).__name__}")
    return parts
