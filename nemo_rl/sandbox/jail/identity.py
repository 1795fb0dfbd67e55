"""Give up this process's identity: change to a user without files or processes, drop all capabilities, and set limits.

Invariant: after `drop`, this process can gain no further right.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Mapping

from kernel import PR_CAP_AMBIENT, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl, syscall

_SIGKILL = 9
_CAPABILITIES_VERSION = 0x20080522
_FIRST_USER = 0x40000000
"""First number of users that own no files or processes on any machine. A unique number is added."""
_NOBODY = 65534
_READ_SEARCH = 2
"""Number of the capability to read files and enter folders of other users."""
_RAISE = 2


def become_nobody(number: int, folder: str | None = None) -> None:
    """Change to a user without other processes, so that the limit of processes counts only this program's processes.

    Args:
        number: A number that no other sandbox of this machine has at the moment.
        folder: A folder that will belong to the user.

    Raises:
        OSError: This process may not change its user.
    """
    os.setgroups([])
    for user in (_FIRST_USER + number, _NOBODY):
        try:
            if folder is not None:
                os.chown(folder, user, user)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a user namespace that maps only some users
            continue
        return
    raise PermissionError("root may not become another user here, which needs CAP_SETUID, CAP_SETGID and CAP_CHOWN")


def become_nobody_among_files(number: int, scratch: str, program: str) -> bool:
    """Change the user as `become_nobody` does, for a program that shares the machine's files.

    Args:
        number: A number that no other sandbox of this machine has at the moment.
        scratch: The scratch folder, which will belong to the user.
        program: Path of the program that will run.

    Returns:
        Whether the program needs the capability to read files of other users, for example of a Python installation
        below `/root`. Landlock still restricts the program to the paths of its rules.
    """
    prctl(PR_SET_KEEPCAPS, 1)
    become_nobody(number, scratch)
    return not (os.access(program, os.X_OK) and os.access(scratch, os.W_OK | os.X_OK))


def drop(keeps_reading: bool = False) -> None:
    """Drop all capabilities, prevent new capabilities, and let this process end with its parent.

    Args:
        keeps_reading: Whether to keep the capability to read files and enter folders of other users.

    Raises:
        OSError: This process does not have the capability to keep.
    """
    kept = 1 << _READ_SEARCH if keeps_reading else 0
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    try:
        syscall("capset", header, struct.pack("IIIIII", kept, kept, kept, 0, 0, 0))
    except PermissionError as error:
        raise PermissionError(
            "the user of a program cannot read Python or its scratch folder, and without namespaces this process may "
            "not let it: install Python where all users can read it, or give this container CAP_DAC_READ_SEARCH"
        ) from error
    if kept:
        prctl(PR_CAP_AMBIENT, _RAISE, ctypes.c_ulong(_READ_SEARCH))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, _SIGKILL)


def limit(limits: Mapping[str, int]) -> None:
    """Set kernel limits, which are named as in `resource`, without `RLIMIT_`."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        soft, hard = value, value + 1 if name == "CPU" else value  # a program that survives SIGXCPU is killed
        _, allowed = resource.getrlimit(kind)
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(kind, (soft, hard))
