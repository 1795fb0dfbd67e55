"""Look at processes through /proc."""

import os
import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """Return the ids of the processes whose parent is `pid`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


def wait_until_gone(pids: list[int], timeout_s: float = 30.0) -> list[int]:
    """Return the processes still alive after at most `timeout_s`, which is long for a machine with other load."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
