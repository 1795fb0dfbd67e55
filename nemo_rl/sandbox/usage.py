"""Read what a process and its descendants use at the moment, from `/proc`."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon:", "RssShmem:")


@dataclass(frozen=True)
class Usage:
    """Resources that several processes use together.

    Attributes:
        cpu_time_s: Processor seconds of the processes that live, and of their children that have ended.
        memory_bytes: Resident memory that is theirs: anonymous and shared, without pages of files. Pages that
            several of them share count for each.
        threads: Threads of all of them; a process has at least one.
    """

    cpu_time_s: float
    memory_bytes: int
    threads: int


def usage_of(pid: int, max_threads: int) -> Usage:
    """Return what a process and all its descendants use; zeros where it has ended.

    Args:
        pid: The process.
        max_threads: Stop when more threads than these are found, because a fork bomb is faster than any count.
    """
    cpu_time_s, memory_bytes, threads, to_visit = 0.0, 0, 0, [pid]
    while to_visit and threads <= max_threads:
        place = Path(f"/proc/{to_visit.pop()}")
        try:
            cpu_time_s += _cpu_time_s(place)
            memory_bytes += _memory_bytes(place)
            for thread in (place / "task").iterdir():
                threads += 1
                to_visit += [int(child) for child in (thread / "children").read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return Usage(cpu_time_s, memory_bytes, threads)


def _cpu_time_s(place: Path) -> float:
    fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S  # own and of ended children, user and system


def _memory_bytes(place: Path) -> int:
    lines = (place / "status").read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))
