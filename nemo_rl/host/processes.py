"""Read the state of processes, end the processes that a process has started, and set the rules of helper processes.

A helper process ends with its parent, and its memory and time have limits.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl.utils.errors import DeadlineExceededError

PROCESS_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "S": "asleep",
    "R": "running",
    "D": "in the kernel",
}
"""Meaning of the kernel's letters for the state of a process."""


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process on this machine, or "?" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped a process on this machine, which then waits until it is continued."""
    return state_of(pid) == "T"


def end_descendants(pid: int) -> None:
    """Send SIGKILL to all descendants of a process of this machine, including processes that start in the meantime."""
    while below := descendants(pid):
        for each in below:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return the running descendants of a process, without zombies, or an empty list if the process has ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def resident_bytes(pid: int) -> int:
    """Return the memory in bytes that a process does not share with others, or 0 if it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


_PR_SET_PDEATHSIG = 1
_MOST_ANSWER_BYTES = 2**20


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends. Exit immediately if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def limit_memory(memory_limit_mb: int) -> None:
    """Limit the address space of this process, so that an allocation above it raises MemoryError."""
    limit = memory_limit_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def call_in_child(work: Callable[[], Any], *, seconds: float, memory_mb: int, what: str) -> Any:
    """Call a function in a forked child process and return its value, which must be JSON-serializable.

    Args:
        work: function to call. It may run untrusted code, for example a chat template.
        seconds: limit for the child's processor time and for its wall-clock time.
        memory_mb: memory in MiB that the child may allocate in addition to what it has at the fork.
        what: name of the work, for error messages.

    Raises:
        DeadlineExceededError: the child takes longer than `seconds`, or ends without a value.
        MemoryError: the child needs more than `memory_mb`.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about other threads, whose locks this work does not use
        child = os.fork()
    if child == 0:
        _answer(work, writing, parent, seconds, memory_mb)
    os.close(writing)
    try:
        answer = _read_answer(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer is None:
        raise DeadlineExceededError(f"{what} takes longer than {seconds:g} s")
    if "value" not in answer:
        raise MemoryError(f"{what} needs more than {memory_mb} MiB of memory")
    return answer["value"]


def _answer(work: Callable[[], Any], writing: int, parent: int, seconds: float, memory_mb: int) -> None:
    """Do the work of `call_in_child` in the child and end the child, so that it runs no further code of the parent."""
    try:
        die_with_parent(parent)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        cpu_s = max(1, round(seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit_memory(memory_mb + pages * os.sysconf("SC_PAGE_SIZE") // 2**20)
        try:
            answer = {"value": work()}
        except MemoryError:
            answer = {}
        os.write(writing, json.dumps(answer).encode()[:_MOST_ANSWER_BYTES])
    finally:
        os._exit(0)


def _read_answer(reading: int, deadline: float) -> dict[str, Any] | None:
    """Return the JSON object that a child writes, or None if it writes none in time."""
    content = b""
    while len(content) <= _MOST_ANSWER_BYTES:
        ready = select.poll()
        ready.register(reading, select.POLLIN)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        data = os.read(reading, 65536)
        if not data:
            break
        content += data
    try:
        answer = json.loads(content)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def import_path() -> tuple[str, list[str]]:
    """Return the module path for a Python that this process starts: PYTHONPATH, and folders to append to it.

    The current folder may belong to another user. It is appended, because Python runs a file `sitecustomize.py` on
    PYTHONPATH when it starts.
    """
    try:
        current = os.getcwd()
    except FileNotFoundError:  # the current folder no longer exists
        current = ""
    known = [entry for entry in sys.path if entry]
    return os.pathsep.join(entry for entry in known if entry != current), [entry for entry in known if entry == current]
