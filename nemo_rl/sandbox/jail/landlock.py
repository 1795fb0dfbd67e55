"""Restrict this process's access to files, TCP and signals with Landlock. The restriction cannot be undone.

Numbers and structures: https://docs.kernel.org/userspace-api/landlock.html. Invariant: every right that the running
kernel can restrict is restricted, so a path without a rule can be neither opened nor changed.
"""

import os
import stat
import struct
from collections.abc import Iterable

from kernel import syscall

_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_ALL_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""Rights on files that each version of Landlock's ABI knows. Version 5 and later versions have 16 rights."""
_ALL = (1 << 16) - 1
_MAKE_DEVICES = 1 << 6 | 1 << 11  # character and block devices
_MAKE_SOCKET = 1 << 9
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP = 1 << 0 | 1 << 1  # bind and connect
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets and signals


RESTRICTS_TRUNCATION = 3
"""First version (Linux 6.2) that also prevents a program from emptying a file that it may not write to."""


def version(newest: int | None) -> int:
    """Return the version of the rules to apply, or 0 if the kernel has no Landlock or it is switched off.

    Args:
        newest: The newest version to apply, or None for the version of the kernel.
    """
    try:
        offered = syscall("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        return 0
    return offered if newest is None else min(offered, newest)


def restrict(
    version: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], may_connect: bool
) -> None:
    """Allow only access to the given paths, and restrict TCP and signals (needs `no_new_privs`).

    Args:
        version: Version of the rules, at least 1.
        readable: Files and folders that may be read and executed.
        writable: Folders in which files may be made, changed and removed.
        devices: Device files that may be read and written.
        may_connect: Whether TCP is allowed, within the program's own namespace of networks.
    """
    handled = _ALL_OF_ABI.get(version, _ALL)
    sizes = "QQQ" if version >= 6 else "QQ" if version >= 4 else "Q"
    fields = (handled, 0 if may_connect else _TCP, _SCOPES)[: len(sizes)]
    attributes = struct.pack(sizes, *fields)
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    for path in readable:
        _allow(ruleset, path, handled & _READ)
    for path in writable:
        _allow(ruleset, path, handled & ~(_MAKE_DEVICES | _MAKE_SOCKET | _IOCTL_DEVICE))
    for path in devices:
        _allow(ruleset, path, handled & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow rights on a path and everything below it. Do nothing if the path does not exist."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    syscall("landlock_add_rule", ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)
