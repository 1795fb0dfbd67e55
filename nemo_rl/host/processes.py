"""Read the state of a process from the kernel."""

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
