"""Read a worker's last log lines and the stacks of its threads, from any node.

`worker_results` adds them to its errors. Invariant: the worker need not cooperate. It may be dead or blocked in C code.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.workers.process import (
    STACK_SIGNAL,
    LoggedProcess,
    ProcessIdentity,
    WorkerIdentity,
    process_start_ticks,
)
from nemo_rl.host.processes import PROCESS_STATES, end_descendants, state_of

_PROBE_TIMEOUT_S = 20.0
_TAIL_BYTES = 64 * 1024
_MAX_STACK_LINES = 80


def tail_of_logs(worker: LoggedProcess, num_lines: int = 20) -> str:
    """Return the last lines that a worker wrote to stdout and stderr, each file under its path."""
    return _ask_nodes(_read_tails, [(worker, num_lines)])[0]


def stacks_of(workers: Sequence[WorkerIdentity]) -> str:
    """Return the stacks of all threads of each worker. Equal stacks occur once."""
    texts = _ask_nodes(_dump_stacks, [(worker,) for worker in workers])
    by_shape: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        by_shape.setdefault(_without_addresses(text), []).append(index)
    blocks = []
    for indices in by_shape.values():
        owners = ", ".join(str(workers[i]) for i in indices)
        lines = texts[indices[0]].splitlines()
        if len(lines) > _MAX_STACK_LINES:
            left_out = len(lines) - _MAX_STACK_LINES
            lines = [*lines[:_MAX_STACK_LINES], f"... {left_out} more lines"]
        blocks.append("\n".join([f"Stacks of {owners}:", *(f"  {line}" for line in lines)]))
    return "\n".join(blocks)


def activity_of(workers: Sequence[ProcessIdentity]) -> list[tuple[str, float]]:
    """Return the kernel's letter for each worker's process state (T: stopped), and its CPU seconds.

    An entry is "?" and 0 if the node does not answer or the process no longer exists.
    """
    answers = _ask_nodes(_read_activity, [(worker,) for worker in workers])
    read = [answer.split() if answer[0] != "(" else ["?", "0"] for answer in answers]
    return [(state, float(seconds)) for state, seconds in read]


def stopped_among[P: ProcessIdentity](workers: Sequence[P]) -> list[P]:
    """Return the workers whose processes are stopped and cannot answer until they are continued."""
    states = activity_of(workers)
    return [worker for worker, (state, _) in zip(workers, states, strict=True) if state in ("T", "t")]


def end_processes(workers: Sequence[ProcessIdentity]) -> None:
    """Send SIGKILL to processes that still run, on any node. A stopped process ignores other requests."""
    _ask_nodes(_kill_process, [(worker,) for worker in workers])


def end_with_descendants(workers: Sequence[ProcessIdentity]) -> None:
    """Send SIGKILL to processes on any node and to all of their descendants."""
    _ask_nodes(_kill_tree, [(worker,) for worker in workers])


def wait_until_gone(workers: Sequence[WorkerIdentity], timeout_s: float) -> list[WorkerIdentity]:
    """Wait for the processes on this node to end.

    Returns:
        The processes still running after `timeout_s`; workers on other nodes are ignored.
    """
    here = ray.get_runtime_context().get_node_id()
    left = [worker for worker in workers if worker.node_id == here]
    end = time.monotonic() + timeout_s
    while left := [worker for worker in left if _is_running(worker)]:
        if time.monotonic() >= end:
            break
        time.sleep(0.02)
    return left


def _ask_nodes(probe: Callable[..., str], questions: Sequence[tuple[Any, ...]]) -> list[str]:
    """Run `probe` on the node of each question's worker, in this process or as a small Ray task."""
    here = ray.get_runtime_context().get_node_id()
    remote_probe = ray.remote(num_cpus=0, max_retries=0)(probe)
    answers: list[Any] = []
    for question in questions:
        node_id = question[0].node_id
        if node_id == here:
            answers.append(probe(*question))
        else:
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            answers.append(remote_probe.options(scheduling_strategy=where).remote(*question))
    end = time.monotonic() + _PROBE_TIMEOUT_S
    return [answer if isinstance(answer, str) else _answer_of(answer, end - time.monotonic()) for answer in answers]


def _answer_of(ref: Any, timeout_s: float) -> str:
    try:
        return ray.get(ref, timeout=max(timeout_s, 0.0))
    except RayError as error:
        return f"(its node did not answer: {type(error).__name__})"


def _read_tails(worker: LoggedProcess, num_lines: int) -> str:
    blocks = []
    for path in worker.log_paths:
        try:
            with open(path, "rb") as file:
                file.seek(max(os.path.getsize(path) - _TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
        except OSError as error:
            lines = [f"(cannot be read: {error})"]
        if lines:
            blocks.append("\n".join([f"Last lines of {path}:", *(f"  {line}" for line in lines)]))
    return "\n".join(blocks) or f"It wrote nothing to {' or '.join(worker.log_paths) or 'a log'}."


def _is_running(worker: ProcessIdentity) -> bool:
    ticks = process_start_ticks(worker.pid)
    return ticks is not None and ticks == worker.start_ticks


def _dump_stacks(worker: WorkerIdentity, wait_s: float = 3.0) -> str:
    if not _is_running(worker):
        return "(the process has ended)"
    path = Path(worker.stacks_path)
    try:
        before = path.stat().st_size
        os.kill(worker.pid, STACK_SIGNAL)
        end, size = time.monotonic() + wait_s, before
        while time.monotonic() < end:
            time.sleep(0.1)
            last, size = size, path.stat().st_size
            if size > before and size == last:
                break
        with path.open() as file:
            file.seek(before)
            state = state_of(worker.pid)
            silent = f"(the process did not react to the signal; it is {PROCESS_STATES.get(state, state)})"
            return file.read().rstrip() or silent
    except OSError as error:
        return f"(cannot be read: {error})"


def _read_activity(worker: ProcessIdentity) -> str:
    try:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "? 0"
    ticks = int(fields[11]) + int(fields[12])
    return f"{fields[0]} {ticks / os.sysconf('SC_CLK_TCK')}"


def _kill_process(worker: ProcessIdentity) -> str:
    if _is_running(worker):
        os.kill(worker.pid, signal.SIGKILL)
    return "asked"


def _kill_tree(worker: ProcessIdentity) -> str:
    if _is_running(worker):
        os.kill(worker.pid, signal.SIGSTOP)  # so that it starts no further processes
        end_descendants(worker.pid)
    return _kill_process(worker)


def _without_addresses(stack: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", stack)
