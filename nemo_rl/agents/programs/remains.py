"""End the processes of a command whose guard cannot do it, because the command has killed or stopped the guard.

They are found by the folder of the command: it is among their environment variables, or their current folder.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from nemo_rl.host.processes import descendants

_AGAIN_S = 0.01


def end_processes(guard: int | None, folder: str, deadline_s: float) -> bool:
    """Kill a guard with what is below it, and the processes of a folder; blocks until there are none.

    Args:
        guard: process id of the guard; None if it has ended.
        folder: path of a folder that belongs to one command.
        deadline_s: seconds after which it gives up.

    Returns:
        Whether all have ended.
    """
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        below = [] if guard is None else descendants(guard)
        found = {*below, *_processes_of(folder)} - {guard, os.getpid()}
        if guard is not None:  # before the others: the command's end has no meaning any more
            found.add(guard)
            guard = None
        elif not found:
            return True
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)
    return False


def _processes_of(folder: str) -> list[int]:
    """Return the processes with a folder among their variables or as their current folder, without zombies."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is no process, or belongs to another user
            place = Path("/proc", str(int(entry)))
            if folder.encode() in (place / "environ").read_bytes() or os.readlink(place / "cwd").startswith(folder):
                found.append(int(entry))
    return found
