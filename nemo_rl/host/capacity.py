"""Measure cores and memory of this machine, within the limits of its control group, and free disk space."""

import errno
import math
import os
import shutil
from pathlib import Path

_CORES_OF_GROUP = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_OF_GROUP = Path("/sys/fs/cgroup/memory.max")


def usable_cores() -> int:
    """Return the number of cores this process may run on, or fewer if a control group limits its CPU time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CORES_OF_GROUP.read_text().split())
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def machine_bytes() -> int:
    """Return the machine's memory in bytes, or less if a control group limits it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_MEMORY_OF_GROUP.read_text()))
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return installed


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = tuple(os.strerror(code) for code in _FULL)
_NOTHING_BYTES = 1 << 20
"""Number of free bytes below which only a checkpoint's smallest files fit."""


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process may still write below a folder, or below its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_disk_full(error: BaseException, free: int) -> bool:
    """Return whether a write failed for lack of space.

    Some libraries report a full disk with their own error, or not at all (`torch.save`: "unexpected pos"). So the free
    bytes at the time of the failure also decide.

    Args:
        error: the error that ended the write.
        free: bytes that were free when the write failed.
    """
    reason: BaseException | None = error
    while reason is not None:
        if getattr(reason, "errno", None) in _FULL or any(text in str(reason) for text in _FULL_TEXTS):
            return True
        reason = reason.__cause__ or reason.__context__
    return free < _NOTHING_BYTES


def readable_bytes(count: int) -> str:
    """Format a number of bytes for people: `5.9 MB`."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
