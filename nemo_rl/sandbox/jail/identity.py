"""Give up identity: a user without files or processes, no capability, and limits of the kernel.

Invariant: after `drop`, this process can gain no right again.
"""

import os
import resource
import struct
from collections.abc import Mapping

from kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl, syscall

_SIGKILL = 9
_CAPABILITIES_VERSION = 0x20080522
_FIRST_USER = 0x40000000
"""Users from here on have no entry, no file and no process on any machine; the process id makes each unique."""
_NOBODY = 65534


def become_nobody(number: int) -> None:
    """Take a user of which no other process exists, so that the limit of processes counts only this program's.

    Args:
        number: A number that no other sandbox of this machine has at the moment.
    """
    os.setgroups([])
    for user in (_FIRST_USER + number, _NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a user namespace that has only some users
            continue
        return


def drop() -> None:
    """Drop all capabilities, gain no new ones, and end with the parent."""
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    syscall("capset", header, struct.pack("IIIIII", 0, 0, 0, 0, 0, 0))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, _SIGKILL)


def limit(limits: Mapping[str, int]) -> None:
    """Set limits of the kernel, by their names in `resource` without `RLIMIT_`."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        soft, hard = value, value + 1 if name == "CPU" else value  # a program that survives SIGXCPU is killed
        _, allowed = resource.getrlimit(kind)
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(kind, (soft, hard))
