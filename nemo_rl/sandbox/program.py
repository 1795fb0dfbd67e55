"""Programs of a sandbox, their limits, and their outcomes."""

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Language:
    """Command and files of a language."""

    file_name: str
    """Name of the file that gets the source."""
    command: Sequence[str]
    """The command line that runs this file; the first item is an absolute path."""
    readable: Sequence[str]
    """Paths that its programs may read and execute, besides the shared libraries of the system."""


@cache
def python() -> Language:
    """Return the Python of this process, without its virtual environment and so without installed packages."""
    program = os.path.realpath(sys.executable)
    config = sysconfig.get_config_vars()
    library = Path(config.get("LIBDIR") or "/nonexistent") / str(config.get("INSTSONAME"))
    readable = [program, *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")), str(library)]
    readable += [str(one) for one in (library.resolve(), "/usr/share/zoneinfo")]
    return Language("main.py", (program, "-I", "-B", "main.py"), tuple(dict.fromkeys(readable)))


LANGUAGES: dict[str, Callable[[], Language]] = {"python": python}
"""Every language by name. A function, because finding its files takes time."""

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
"""Paths of shared libraries, which any program needs to start."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
"""Device files that programs may read and write."""


def language_of(name: str) -> Language:
    """Return the language of a name.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in LANGUAGES:
        raise ValueError(f"The language {name!r} is unknown; known are {', '.join(LANGUAGES)}.")
    return LANGUAGES[name]()


_FIRST_FREE_PORT = 1024
_PORT_FOR_PRIVILEGED = 65010


@dataclass(frozen=True)
class Limits:
    """Limits of one run, whose outcome says which limit has ended it."""

    wall_time_s: float = 10.0
    """Seconds from the start of the program."""
    cpu_time_s: float = 10.0
    """Seconds of processor time of all processes of the run together; each one is also ended by the kernel when it
    alone used that much."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all together, in MiB."""
    processes: int = 16
    """Processes and threads at the same time; only threads where the kernel cannot end or count processes: without
    namespaces, and for root that may not mount."""
    file_mb: int = 16
    """Size of each file, in MiB."""
    scratch_mb: int = 64
    """Size of the scratch folder, in MiB."""
    output_bytes: int = 65536
    """Bytes of standard output, and of standard error, that are kept; a program that writes more is ended."""


@dataclass(frozen=True)
class Program:
    """Source code or a command to run, with what it may see. Its `repr` leaves out what may be secret."""

    source: str = ""
    """Text of the program."""
    language: str = "python"
    """Name of its language in `nemo_rl.sandbox.program.LANGUAGES`."""
    command: tuple[str, ...] = ()
    """Command line to run in place of a source; the first item is an absolute path."""
    arguments: tuple[str, ...] = ()
    """Arguments of the source's command line."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables besides PATH, HOME, TMPDIR and LANG, or in place of them."""
    readable: tuple[str, ...] = ()
    """Absolute paths of files and folders that it may read and execute, besides those of the language."""
    stdin: bytes = field(default=b"", repr=False)
    """Bytes of its standard input."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Content of files in the scratch folder, which is its current folder, by relative path."""
    inherited: tuple[int, ...] = ()
    """Open file descriptors of this process that the program gets under the same numbers. Pipes are the only way to
    talk with a running program; it cannot tell apart who else holds them."""
    address: tuple[str, int] | None = None
    """Host and port of the one TCP server that it may connect to, which it finds at `port_inside` of 127.0.0.1; None
    for no network. It needs a mechanism with namespaces."""
    returned: tuple[str, ...] = ()
    """Names of files that are read from the scratch folder when it has ended."""
    returned_bytes: int = 2**20
    """Largest size of each of them."""

    @property
    def port_inside(self) -> int | None:
        """The port of 127.0.0.1 where the program finds its server: the server's, or another one below 1024."""
        return None if self.address is None else port_inside(self.address[1])


def port_inside(port: int) -> int:
    """Return the port inside a sandbox for a server's port, because the kernel keeps those below 1024 for root."""
    return port if port >= _FIRST_FREE_PORT else _PORT_FOR_PRIVILEGED


class End(StrEnum):
    """Reasons why a program ended."""

    EXITED = "exited"
    """By itself, with any exit code, or by a signal that no limit sent."""
    WALL_TIME = "wall time"
    CPU_TIME = "CPU time"
    MEMORY = "memory"
    """All processes together held too much. One process that asks for too much gets a `MemoryError` instead."""
    PROCESSES = "processes"
    """Only where the kernel could not refuse to start them."""
    SCRATCH = "scratch folder"
    """Only without namespaces; otherwise the folder is full at its limit, which the program sees as an `OSError`."""
    OUTPUT = "output"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a run. When it is returned, no process and no file of the run exists any more."""

    end: End
    """Why the program ended."""
    exit_code: int
    """Its exit code, 128 + n after signal n (137 where a limit ended it)."""
    stdout: str
    """Standard output, at most `Limits.output_bytes` of it; bytes that are not UTF-8 are replaced."""
    stderr: str
    """Standard error in the same way."""
    wall_time_s: float
    """Seconds from its start to its end."""
    cpu_time_s: float
    """Processor seconds, of the start of the sandbox too."""
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    """Content of the files of `Program.returned` that it left; None for one that is too large or no regular file. Empty
    for a cancelled run."""

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.end is End.EXITED and self.exit_code == 0
