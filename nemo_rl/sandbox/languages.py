"""Languages that a sandbox can run: the command of a source file, and the files that the language itself needs.

Another language is an object of `Language` and a line in `LANGUAGES`; the sandbox does not change.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
