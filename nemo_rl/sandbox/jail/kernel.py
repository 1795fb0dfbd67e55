"""Make system calls that Python does not wrap, some of them by number.

Errors of the kernel are raised as `OSError` with the name of the call. This file imports only the standard library.
"""

import ctypes
import os

MACHINE = os.uname().machine

CALLS = {
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "pivot_root": {"x86_64": 155, "aarch64": 41}.get(MACHINE, -1),
    "capset": {"x86_64": 126, "aarch64": 91}.get(MACHINE, -1),
}
"""Numbers of the system calls that have no wrapper in the C library."""

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47

_LIBC = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call of `CALLS`, with integers passed as 64 bits.

    Raises:
        OSError: The kernel refused the call. The message has the name of the call.
    """
    passed = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(CALLS[name]), *passed), name)


def prctl(option: int, argument: int, second: object = None) -> None:
    """Change an attribute of this process (`man 2 prctl`)."""
    _checked(_LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), second or ctypes.c_ulong(0), 0, 0), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system (`man 2 mount`)."""
    type_name = kind.encode() if kind else None
    done = _LIBC.mount(source.encode(), target.encode(), type_name, ctypes.c_ulong(flags), options.encode())
    _checked(done, f"mount on {target}")


def unmount(target: str, flags: int) -> None:
    """Remove a mount (`man 2 umount2`)."""
    _checked(_LIBC.umount2(target.encode(), flags), f"unmount {target}")


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
