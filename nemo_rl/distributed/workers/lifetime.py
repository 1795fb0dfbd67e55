"""Wait for the start of workers, end their processes, and find lost workers."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from nemo_rl.distributed.workers.logs import end_processes, stopped_among, wait_until_gone
from nemo_rl.distributed.workers.results import PendingCall, WorkerSlot, gather
from nemo_rl.distributed.workers.start_phases import PROCESS, WorkerPhase, slowest_of
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError


def await_start(
    slots: list[WorkerSlot],
    indices: Sequence[int],
    calls: tuple[Sequence[Any], Sequence[Any]],
    end: float,
    phase: str,
    began: float,
) -> list[WorkerPhase]:
    """Wait until processes have reported their identity and built their worker objects.

    Args:
        slots: workers of the group. Starting workers get their identities here, even if a constructor fails.
        indices: positions of the starting workers.
        calls: calls of `WorkerHost.report_identity` and of `WorkerHost.build`, in the order of `indices`.
        end: `time.monotonic()` at the deadline.
        phase: name of the wait for errors.
        began: `time.monotonic()` at which the processes were requested.

    Returns:
        The phases of their start.

    Raises:
        Exception: an error of `gather`.
    """
    reports, builds = calls
    new, arrivals = [slots[idx] for idx in indices], dict[int, float]()
    asked = [PendingCall(ref, slot) for ref, slot in zip(reports, new, strict=True)]
    identities = gather(asked, new, end - time.monotonic(), phase, arrivals)
    for idx, who in zip(indices, identities, strict=True):
        slots[idx] = replace(slots[idx], identity=who)
    called = [PendingCall(ref, slots[idx]) for idx, ref in zip(indices, builds, strict=True)]
    built = gather(called, [call.slot for call in called], max(end - time.monotonic(), 0.0), phase)
    workers = [(who.name, who.node_ip) for who in identities]
    return slowest_of(workers, [{PROCESS: arrivals[idx] - began} for idx in indices]) + slowest_of(workers, built)


logger = logging.getLogger(__name__)

_KILL_S = 5.0
"""Seconds that Ray may need to kill a process before this process sends SIGKILL, and seconds to wait after that."""
_SIGN_OF_LIFE_S = 3.0
"""Seconds within which an idle worker must answer."""


def kill_workers(slots: Sequence[WorkerSlot]) -> bool:
    """End the processes of workers. Return whether no process on this node is left."""
    if not ray.is_initialized():
        return True
    for slot in slots:
        ray.kill(slot.handle, no_restart=True)
    known = [slot.identity for slot in slots if slot.identity]
    left = wait_until_gone(known, timeout_s=_KILL_S)
    if left:
        end_processes(left)
        left = wait_until_gone(left, timeout_s=_KILL_S)
    for identity in left:
        logger.warning("%s was killed and is still running.", identity)
    return not left


def find_loss(slots: Sequence[WorkerSlot], *, silence_is_loss: bool) -> str | None:
    """Ask workers whether they are alive.

    Args:
        slots: workers that depend on each other.
        silence_is_loss: whether a running worker that is too busy to answer counts as lost.

    Returns:
        One line about a worker that is dead, stopped or (with `silence_is_loss`) silent; None if there is none.

    Raises:
        RayDiedError: the local Ray ended.
    """
    calls = [PendingCall(slot.handle.report_identity.remote(), slot) for slot in slots]
    try:
        gather(calls, slots, _SIGN_OF_LIFE_S, "sign of life")
    except WorkerDiedError as death:
        return first_line(death)
    except DeadlineExceededError as silence:
        is_stopped = bool(stopped_among([slot.identity for slot in slots if slot.identity]))
        return first_line(silence) if is_stopped or silence_is_loss else None
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message. It names the worker. Logs and stacks follow it."""
    return str(error).partition("\n")[0]
