"""Read the state of processes from the kernel, and end what a process has started."""

import os
import signal
import time
from pathlib import Path

PROCESS_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "S": "asleep",
    "R": "running",
    "D": "in the kernel",
}
"""Meaning of the kernel's letters for the state of a process."""


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process on this machine; "?" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped a process on this machine: it does nothing until it is continued."""
    return state_of(pid) == "T"


def end_descendants(pid: int) -> None:
    """Send SIGKILL to all processes below a process of this machine, also to those that start meanwhile."""
    while below := descendants(pid):
        for each in below:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return the running processes below a process, without zombies; an empty list if it has ended."""
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
    """Return the memory that a process has to itself, without shared pages; 0 if it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
