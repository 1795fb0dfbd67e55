"""Define the programs that run in a sandbox, their limits and their outcomes."""

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
    """Command and files that run programs of a language."""

    file_name: str
    """Name of the file to which the source code is written."""
    command: Sequence[str]
    """Command line that runs this file. Its first item is an absolute path."""
    readable: Sequence[str]
    """Paths that programs of the language may read and execute, besides the shared libraries of the system."""


@cache
def python() -> Language:
    """Return the Python of this process, without its virtual environment and therefore without installed packages."""
    program = os.path.realpath(sys.executable)
    config = sysconfig.get_config_vars()
    library = Path(config.get("LIBDIR") or "/nonexistent") / str(config.get("INSTSONAME"))
    readable = [program, *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")), str(library)]
    readable += [str(one) for one in (library.resolve(), "/usr/share/zoneinfo")]
    return Language("main.py", (program, "-I", "-B", "main.py"), tuple(dict.fromkeys(readable)))


LANGUAGES: dict[str, Callable[[], Language]] = {"python": python}
"""Function that returns each language, by name. A function is used because it takes time to find a language's files."""

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
    """Limits of one run. The outcome of the run says which limit ended it."""

    wall_time_s: float = 10.0
    """Time in seconds from the start of the program."""
    cpu_time_s: float = 10.0
    """Processor seconds of all processes together. The kernel also ends each process that alone used that much."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all processes together, in MiB."""
    processes: int = 16
    """Number of processes and threads at the same time. The program may only start threads if the kernel cannot end or
    count processes, which is the case without namespaces, and for root without the right to mount."""
    file_mb: int = 16
    """Size of each file, in MiB."""
    scratch_mb: int = 64
    """Size of the scratch folder, in MiB."""
    output_bytes: int = 65536
    """Bytes of standard output, and of standard error, that are kept. A program that writes more is ended."""


@dataclass(frozen=True)
class Program:
    """Source code or a command to run, and what it may access. Fields that may be secret are not in the `repr`."""

    source: str = ""
    """Text of the program."""
    language: str = "python"
    """Name of its language in `nemo_rl.sandbox.program.LANGUAGES`."""
    command: tuple[str, ...] = ()
    """Command line to run in place of source code. Its first item is an absolute path."""
    arguments: tuple[str, ...] = ()
    """Arguments that are appended to the command line of the language."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables in addition to PATH, HOME, TMPDIR and LANG, which they may replace."""
    readable: tuple[str, ...] = ()
    """Absolute paths of files and folders that the program may read and execute, besides those of the language."""
    stdin: bytes = field(default=b"", repr=False)
    """Content of the program's standard input."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Content of files in the scratch folder, by relative path. This folder is the program's current folder."""
    inherited: tuple[int, ...] = ()
    """Open file descriptors of this process that the program gets under the same numbers. Pipes are the only way to
    exchange data with a running program. The program cannot tell who else holds their other ends."""
    address: tuple[str, int] | None = None
    """Host and port of the one TCP server that the program may connect to, or None for no network. The program reaches
    the server at `port_inside` of 127.0.0.1. An address needs a mechanism with namespaces."""
    returned: tuple[str, ...] = ()
    """Names of files that are read from the scratch folder after the program has ended."""
    returned_bytes: int = 2**20
    """Largest size in bytes of each returned file."""

    @property
    def port_inside(self) -> int | None:
        """The port of 127.0.0.1 at which the program reaches its server (from `port_inside`), or None without one."""
        return None if self.address is None else port_inside(self.address[1])


def port_inside(port: int) -> int:
    """Return the port inside a sandbox for a server's port. It differs below 1024, where only root may listen."""
    return port if port >= _FIRST_FREE_PORT else _PORT_FOR_PRIVILEGED


class End(StrEnum):
    """Reasons why a program ended."""

    EXITED = "exited"
    """The program ended by itself with any exit code, or by a signal that no limit sent."""
    WALL_TIME = "wall time"
    CPU_TIME = "CPU time"
    MEMORY = "memory"
    """All processes together used too much memory. One process that asks for too much gets a `MemoryError` instead."""
    PROCESSES = "processes"
    """The program started too many processes, and the kernel could not refuse to start them."""
    SCRATCH = "scratch folder"
    """The scratch folder grew beyond its limit. With namespaces, the program sees an `OSError` instead."""
    OUTPUT = "output"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a run. No process and no file of the run is left when the outcome is returned."""

    end: End
    """Reason why the program ended."""
    exit_code: int
    """Exit code of the program, or 128 + n if signal n ended it (137 if a limit did)."""
    stdout: str
    """Standard output, of which at most `Limits.output_bytes` are kept. Bytes that are not UTF-8 are replaced."""
    stderr: str
    """Standard error, with the same limit and replacement."""
    wall_time_s: float
    """Time in seconds from the start of the program to its end."""
    cpu_time_s: float
    """Processor time in seconds, including the start of the sandbox."""
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    """Content of each file of `Program.returned` that the program left. The content is None for a file that is too
    large or is not a regular file. A cancelled run has no files here."""

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.end is End.EXITED and self.exit_code == 0
