"""Free bytes of a disk, and whether an error means that there were none left."""

import errno
import os
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = tuple(os.strerror(code) for code in _FULL)
_NOTHING_BYTES = 1 << 20
"""Less than this is not enough for any file of a checkpoint but the smallest."""


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write below a folder, or below its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_disk_full(error: BaseException, free: int) -> bool:
    """Whether a write failed for lack of space.

    Writers in other languages report it in their own ways, or not at all (`torch.save`: "unexpected pos"), so the
    free bytes at the time of the failure count too.

    Args:
        error: what ended the write.
        free: bytes that were free when it failed.
    """
    reason: BaseException | None = error
    while reason is not None:
        if getattr(reason, "errno", None) in _FULL or any(text in str(reason) for text in _FULL_TEXTS):
            return True
        reason = reason.__cause__ or reason.__context__
    return free < _NOTHING_BYTES


def readable_bytes(count: int) -> str:
    """A number of bytes for people: `5.9 MB`."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
