"""Limit the memory and the output of an environment's process from inside, and find the processes that it leaves.

memory      a thread adds up the resident memory of the process and its descendants; above the limit it writes why,
and ends them all. The driver starts the actor again and finds the reason in the log.
output      of `print` and the like only the first part is kept
processes   orphans of descendants become children of this process (Linux: PR_SET_CHILD_SUBREAPER), so that they are
found and ended with it
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import TextIO

from nemo_rl.host.processes import descendants, end_descendants, resident_bytes

MEMORY_MARK = "This environment uses too much memory: "
"""Beginning of the log line in which a process that uses too much memory says why it ends."""

_LOOK_S = 0.25
_MAX_OUTPUT_CHARS = 16 << 20
_PR_SET_CHILD_SUBREAPER = 36
_GIB = 1 << 30


class _BoundedText:
    """A text stream that writes a limited number of characters, and then says once that it drops the rest."""

    def __init__(self, stream: TextIO, max_chars: int) -> None:
        self._stream = stream
        self._left = max_chars

    def write(self, text: str) -> int:
        """Write the text, or the part of it that is within the limit."""
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write("\n[the environment wrote more, which is left out]\n")
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def guard_process(max_memory_gb: float | None) -> None:
    """Limit the memory and the output of this process, and adopt the orphans of its descendants.

    Args:
        max_memory_gb: GiB that this process and its descendants may use together, or None for no limit.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.stdout = _BoundedText(sys.stdout, _MAX_OUTPUT_CHARS)
    sys.stderr = _BoundedText(sys.stderr, _MAX_OUTPUT_CHARS)
    if max_memory_gb is not None:
        watch = threading.Thread(target=_watch_memory, args=(max_memory_gb,), name="memory limit", daemon=True)
        watch.start()


def _watch_memory(max_memory_gb: float) -> None:
    """End this process and its descendants as soon as they use more than the limit."""
    own = os.getpid()
    while True:
        time.sleep(_LOOK_S)
        used = sum(resident_bytes(pid) for pid in (own, *descendants(own))) / _GIB
        if used > max_memory_gb:
            reason = f"{used:.2f} GiB, and max_memory_gb={max_memory_gb:g} allows no more"
            os.write(2, f"{MEMORY_MARK}{reason}\n".encode())
            end_descendants(own)
            os.kill(own, signal.SIGKILL)
