"""Limit the system calls of this process and its children to a list. The limit cannot be undone.

The filter is a program in classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html). It compares the
number of the call with each allowed number, and for some calls also an argument. Any other call fails with EPERM.
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

_OF_A_PROCESS = (
    *("getpgid", "getsid", "get_robust_list"),
    *("sched_getaffinity", "sched_getparam", "sched_getscheduler"),
)
"""Calls that return information about the process that their first argument names."""
_OF_A_CLOCK = ("clock_gettime", "clock_getres", "clock_nanosleep")
_PROCESSES = ("fork", "vfork", "setsid", "setpgid")
"""Calls that are useful only if the program may start processes."""
_CHANGES_OF_METADATA = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "utimensat", "utime", "utimes", "futimesat", "mknod", "mknodat"),
)
"""Calls that Landlock does not restrict. They are allowed only if the program has a file system of its own."""
_PROBES = ("capget",)
"""Calls that reveal which processes exist. Their argument is in memory, which a filter cannot read."""
_NETWORK = ("socket", "connect", "bind", "listen", "accept", "accept4")
"""Calls for a program that may use the network of its own network namespace."""
_INTERNET, _STREAM = (2, 10), 1  # AF_INET and AF_INET6, SOCK_STREAM

_FILE_COMMANDS = (
    *(0, 1, 2, 3, 4, 1030),  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
    *(5, 9, 11, 16, 36, 1025, 1032, 1034),  # F_GETLK, F_GETOWN, F_GETSIG, F_GETOWN_EX, F_OFD_GETLK, F_GETLEASE ...
)
"""Allowed commands of `fcntl`. F_SETOWN and F_SETSIG send signals, F_SETLEASE delays other processes that open a file,
F_NOTIFY watches files of others, and F_SETPIPE_SZ takes kernel memory, so they are not allowed."""
_LOCK_COMMANDS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and their variants for open files. They succeed and do nothing, because each lock takes kernel
memory without a limit. SQLite needs these commands, and no other program uses the files of the scratch folder."""
_SOCKET_OPTIONS: dict[int, tuple[int, ...]] = {
    1: (2, 9, 10, 13, 15, 20, 21),  # SO_REUSEADDR, SO_KEEPALIVE, _OOBINLINE, _LINGER, _REUSEPORT, _RCVTIMEO, _SNDTIMEO
    6: (1, 3, 4, 5, 6, 18),  # TCP_NODELAY, TCP_CORK, TCP_KEEPIDLE, _KEEPINTVL, _KEEPCNT, _USER_TIMEOUT
    41: (26,),  # IPV6_V6ONLY
}
"""Allowed options of `setsockopt` by level. SO_SNDBUF, SO_RCVBUF and filters would take kernel memory."""
_CLOCKS = 16
"""Clocks below this number belong to the machine or the caller. Other numbers can name the clock of any process."""
_SUCCEED = 0x00050000
"""Action that makes a call return 0 without being executed."""

type Instruction = tuple[int, int, int, int]


def is_supported() -> bool:
    """Return whether the system call numbers of this machine are known."""
    return MACHINE in _ARCHITECTURES


def install(own_namespaces: bool, may_fork: bool, may_connect: bool, pid: int) -> None:
    """Install the filter (needs `no_new_privs`).

    Args:
        own_namespaces: Whether the program has namespaces of processes and mounts of its own. Otherwise it may signal
            only itself and change no metadata of files.
        may_fork: Whether the program may start processes, and not only threads.
        may_connect: Whether the program may use TCP. Other sockets are refused, because Unix sockets in the file system
            belong to no namespace.
        pid: Process id of the program.
    """
    instructions = program(own_namespaces, may_fork, may_connect, pid)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, filter_program)


def program(own_namespaces: bool, may_fork: bool, may_connect: bool, pid: int) -> list[Instruction]:
    """Return the filter's instructions, from the arguments of `install`."""
    column = list(_ARCHITECTURES).index(MACHINE)
    rules = _rules(own_namespaces, may_fork, pid)
    refused = {
        *(() if own_namespaces else _PROBES),
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
    """Return the instructions that follow the comparison with a call's number, for calls whose arguments matter."""
    rules = {
        "clone": _clone(0 if may_fork else _CLONE_THREAD),
        "clone3": [(_RETURN, 0, 0, _UNKNOWN)],  # the flags of clone3 are in memory; the C library falls back to clone
        # An unconnected datagram socket could send to any socket in the file system, which Landlock does not restrict.
        "socketpair": [*_load(1, 0xF), (_EQUAL, 0, 1, 1), (_RETURN, 0, 0, _ALLOW), _refuse()],
        "socket": [*_load(1, 0xF), (_EQUAL, 1, 0, _STREAM), _refuse(), *_only(0, _INTERNET)],
        "prlimit64": _only(0, (0,)),
        "prctl": _only(0, (15, 16, 0x53564D41)),  # names of threads and of memory
        "fcntl": [*_load(1), *_each(_FILE_COMMANDS, _ALLOW), *_each(_LOCK_COMMANDS, _SUCCEED), _refuse()],
        "setsockopt": _socket_options(),
        "ioctl": _only(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal, how many bytes wait
    }
    if not own_namespaces:
        rules |= dict.fromkeys(("kill", "tgkill", "tkill"), _only(0, (pid,)))
        rules |= dict.fromkeys(_OF_A_PROCESS, _only(0, (0, pid)))
        rules |= dict.fromkeys(_OF_A_CLOCK, [*_load(0), (_AT_LEAST, 1, 0, _CLOCKS), (_RETURN, 0, 0, _ALLOW), _refuse()])
        rules |= {"getpriority": _only(1, (0, pid))}
    return rules


def _clone(needed: int) -> list[Instruction]:
    """Refuse flags that make namespaces, and require the flag `needed` unless it is 0."""
    allowed = [(_EQUAL, 0, 1, needed), (_RETURN, 0, 0, _ALLOW)]
    return [*_load(0, _CLONE_NEW | needed), *allowed, _refuse()]


def _load(argument: int, mask: int | None = None) -> list[Instruction]:
    """Load the lower 32 bits of an argument, or the part of these bits that `mask` selects."""
    masked = [] if mask is None else [(_AND, 0, 0, mask)]
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *masked]


def _only(argument: int, values: Iterable[int]) -> list[Instruction]:
    return [*_load(argument), *_each(values, _ALLOW), _refuse()]


def _each(values: Iterable[int], action: int) -> list[Instruction]:
    """Compare the loaded value with each of the given values, and take the action if one is equal."""
    return [one for value in values for one in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, action))]


def _socket_options() -> list[Instruction]:
    """Allow some options, by level (the second argument) and name (the third one)."""
    rules: list[Instruction] = _load(1)
    for level, options in _SOCKET_OPTIONS.items():
        body = _only(2, options)
        rules += [(_EQUAL, 0, len(body), level), *body]
    return [*rules, _refuse()]


def _refuse() -> Instruction:
    return (_RETURN, 0, 0, _REFUSE)
