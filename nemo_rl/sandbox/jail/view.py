"""Give this process its own root folder, with some read-only paths and an empty scratch folder.

The process must be in a new mount namespace. Invariant: after `enter`, nothing in the old root can be reached.
"""

import os
import struct
from collections.abc import Iterable

from kernel import mount, syscall, unmount

_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_PLACE = "/proc"
"""Folder in which the new root is built. Every machine has it, and the program must not see its content."""


def enter(readable: Iterable[str], devices: Iterable[str], scratch: str) -> None:
    """Replace the root by a read-only root that contains the given paths, and an empty folder for the scratch folder.

    Args:
        readable: Files and folders to keep, read-only. Paths that do not exist are left out.
        devices: Device files to keep.
        scratch: Path of the scratch folder in the new root.
    """
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    mount("sandbox", _PLACE, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in sorted({*readable, *devices}):
        _keep(path, read_only=path not in devices)
    os.makedirs(_PLACE + scratch, exist_ok=True)
    os.chdir(_PLACE)
    syscall("pivot_root", b".", b".")
    unmount(".", _DETACH)
    os.chdir("/")
    _make_read_only("/", recursive=False)


def mount_scratch(scratch: str, num_bytes: int, num_files: int) -> None:
    """Mount an empty folder in memory. All users may write to it, and it disappears with its last process."""
    mount("scratch", scratch, "tmpfs", _NOSUID | _NODEV, f"size={num_bytes},nr_inodes={num_files},mode=777")


def _keep(path: str, read_only: bool) -> None:
    target = _PLACE + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
    mount(path, target, None, _BIND | _RECURSIVE)
    if read_only:
        _make_read_only(target, recursive=True)


def _make_read_only(path: str, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall("mount_setattr", _AT_FDCWD, path.encode(), flags, attributes, len(attributes))
