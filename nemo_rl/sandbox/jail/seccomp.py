"""Limit the system calls of this process and its children to a list, for good.

The filter is a program of the kernel's classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html): a chain
of comparisons with the number of the call, some of which also look at an argument. Everything else fails with EPERM.
"""

import ctypes
import errno
import struct
from collections.abc import Iterable

from kernel import MACHINE, PR_SET_SECCOMP, prctl
from syscalls import NUMBERS

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_AT_LEAST = 0x35
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
_KILL = 0x80000000
_MODE_FILTER = 2
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # every flag that makes a namespace

_PROCESSES = ("fork", "vfork", "setsid", "setpgid")
"""Calls that only make sense where the program may start processes."""
_CHANGES_OF_METADATA = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "utimensat", "utime", "utimes", "futimesat", "mknod", "mknodat"),
)
"""Landlock does not cover these, so they need a file system of the program's own."""
_NETWORK = ("socket", "connect", "bind", "listen", "accept", "accept4")
"""Calls for a program that may use the network of its own namespace."""
_INTERNET, _STREAM = (2, 10), 1  # AF_INET and AF_INET6, SOCK_STREAM

type Instruction = tuple[int, int, int, int]


def is_supported() -> bool:
    """Return whether the numbers of this machine's system calls are known."""
    return MACHINE in _ARCHITECTURES


def install(own_namespaces: bool, may_fork: bool, may_connect: bool, pid: int) -> None:
    """Install the filter; needs `no_new_privs`.

    Args:
        own_namespaces: Whether the program has namespaces of processes and mounts of its own. Otherwise it may signal
            only itself and change no metadata of files.
        may_fork: Whether it may start processes, and not only threads.
        may_connect: Whether it may use TCP. Other sockets are refused, because Unix sockets in the file system belong
            to no namespace.
        pid: Its process id.
    """
    instructions = program(own_namespaces, may_fork, may_connect, pid)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, filter_program)


def program(own_namespaces: bool, may_fork: bool, may_connect: bool, pid: int) -> list[Instruction]:
    """Return the filter's instructions; the arguments are those of `install`."""
    column = list(_ARCHITECTURES).index(MACHINE)
    rules = _rules(own_namespaces, may_fork, pid)
    refused = {
        *(() if may_fork else _PROCESSES),
        *(() if own_namespaces else _CHANGES_OF_METADATA),
        *(() if may_connect else _NETWORK),
    }
    found: list[Instruction] = [
        *[(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURES[MACHINE]), (_RETURN, 0, 0, _KILL)],
        *[(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _UNKNOWN)],
    ]
    for name, numbers in NUMBERS.items():
        number = numbers[column]
        if number is not None and name not in refused:
            body = rules.get(name, [(_RETURN, 0, 0, _ALLOW)])
            found += [(_EQUAL, 0, len(body), number), *body]
    return [*found, (_RETURN, 0, 0, _REFUSE)]


def _rules(own_namespaces: bool, may_fork: bool, pid: int) -> dict[str, list[Instruction]]:
    """Return what follows the comparison with a call's number, for calls whose arguments matter."""
    rules = {
        "clone": _clone(0 if may_fork else _CLONE_THREAD),
        "clone3": [(_RETURN, 0, 0, _UNKNOWN)],  # its flags are in memory; the C library falls back to clone
        # An unconnected datagram socket could send to any socket in the file system, which Landlock does not restrict.
        "socketpair": [*_load(1, 0xF), (_EQUAL, 0, 1, 1), (_RETURN, 0, 0, _ALLOW), _refuse()],
        "socket": [*_load(1, 0xF), (_EQUAL, 1, 0, _STREAM), _refuse(), *_only(0, _INTERNET)],
        "prlimit64": _only(0, (0,)),
        "prctl": _only(0, (15, 16, 0x53564D41)),  # names of threads and of memory
        "fcntl": _except(1, (8, 10, 15)),  # F_SETOWN, F_SETSIG and F_SETOWN_EX send signals
        "ioctl": _only(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal, how many bytes wait
    }
    if not own_namespaces:
        rules |= {"kill": _only(0, (pid,)), "tgkill": _only(0, (pid,)), "tkill": _only(0, (pid,))}
    return rules


def _clone(needed: int) -> list[Instruction]:
    """Allow no new namespaces; `needed` is a flag that has to be set, or 0."""
    allowed = [(_EQUAL, 0, 1, needed), (_RETURN, 0, 0, _ALLOW)]
    return [*_load(0, _CLONE_NEW | needed), *allowed, _refuse()]


def _load(argument: int, mask: int | None = None) -> list[Instruction]:
    """Load the lower 32 bits of an argument, and a part of them where a mask is given."""
    masked = [] if mask is None else [(_AND, 0, 0, mask)]
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *masked]


def _only(argument: int, values: Iterable[int]) -> list[Instruction]:
    allowed = [one for value in values for one in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [*_load(argument), *allowed, _refuse()]


def _except(argument: int, values: Iterable[int]) -> list[Instruction]:
    refused = [one for value in values for one in ((_EQUAL, 0, 1, value), _refuse())]
    return [*_load(argument), *refused, (_RETURN, 0, 0, _ALLOW)]


def _refuse() -> Instruction:
    return (_RETURN, 0, 0, _REFUSE)
