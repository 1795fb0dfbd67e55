"""Read what a process and its descendants use at the moment, from `/proc`."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon:", "RssShmem:")
_PIPE_BYTES = 65536
_OF_A_QUEUE = 2
"""Bytes of kernel memory for a byte in the queue of a TCP socket, whose buffers grow."""


@dataclass(frozen=True)
class Usage:
    """Resources that several processes use together."""

    cpu_time_s: float
    """Processor seconds of the processes that live, and of their children that have ended."""
    memory_bytes: int
    """Resident memory that is theirs: anonymous and shared, without pages of files, and what their pipes and sockets
    may hold in the kernel. Pages that several of them share count for each."""
    threads: int
    """Threads of all of them; a process has at least one."""


def usage_of(pid: int, max_threads: int) -> Usage:
    """Return what a process and all its descendants use; zeros where it has ended.

    Args:
        pid: The process.
        max_threads: Stop when more threads than these are found, because a fork bomb is faster than any count.
    """
    cpu_time_s, memory_bytes, threads, to_visit = 0.0, 0, 0, [pid]
    buffers: dict[str, int] = {}
    while to_visit and threads <= max_threads:
        place = Path(f"/proc/{to_visit.pop()}")
        try:
            cpu_time_s += _cpu_time_s(place)
            memory_bytes += _memory_bytes(place)
            buffers |= _buffers(place)
            for thread in (place / "task").iterdir():
                threads += 1
                to_visit += [int(child) for child in (thread / "children").read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return Usage(cpu_time_s, memory_bytes + sum(buffers.values()), threads)


def _cpu_time_s(place: Path) -> float:
    fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S  # own and of ended children, user and system


def _memory_bytes(place: Path) -> int:
    lines = (place / "status").read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))


def _buffers(place: Path) -> dict[str, int]:
    """Return the most bytes that each pipe and each socket of a process may hold, by its name.

    Empty where this process may not look, as root without CAP_SYS_PTRACE: such a program has one process, whose few
    descriptors limit its buffers.
    """
    found: dict[str, int] = {}
    try:
        for entry in os.scandir(place / "fd"):
            name = os.readlink(entry.path)
            if name.startswith(("pipe:", "socket:")):
                found[name] = _PIPE_BYTES if name.startswith("pipe:") else _socket_bytes()
    except (PermissionError, FileNotFoundError):  # the file was closed meanwhile, or is another user's
        return found
    if any(name.startswith("socket:") for name in found):
        for name, num_bytes in _tcp_queues(place).items():
            if name in found:
                found[name] = max(found[name], num_bytes)
    return found


def _tcp_queues(place: Path) -> dict[str, int]:
    """Return the bytes that TCP sockets hold, by the name of the socket."""
    queues = {}
    for table in ("tcp", "tcp6"):
        for line in (place / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            held = sum(int(size, 16) for size in fields[4].split(":"))
            queues[f"socket:[{fields[9]}]"] = _OF_A_QUEUE * held
    return queues


@cache
def _socket_bytes() -> int:
    """Return the size of the buffer of a socket that is as it was made."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii"))
    except (OSError, ValueError):  # a container may hide it
        return 212_992
