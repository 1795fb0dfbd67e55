"""Build the plan from which the code inside the sandbox (`nemo_rl/sandbox/jail`) isolates itself and runs a program."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_rl.sandbox.mechanisms import Mechanism, is_privileged, is_root
from nemo_rl.sandbox.program import DEVICES, SYSTEM_LIBRARIES, Language, Limits, Program

_MAX_LINKS = 40
"""Largest number of links on the way to one path, as in the kernel."""


def with_links(paths: Iterable[str]) -> list[str]:
    """Return the targets of absolute paths, and all symbolic links on the way to these targets.

    Paths that do not exist are left out, and so are paths below another path of the result.
    """
    found: dict[str, None] = {}
    for path in paths:
        found |= dict.fromkeys(_steps(os.path.abspath(path)))
    folders = {path for path in found if os.path.isdir(path) and not os.path.islink(path)}
    return [path for path in found if not any(str(above) in folders for above in Path(path).parents)]


def _steps(path: str) -> list[str]:
    """Return the links on the way to a path and the path without links, or an empty list if the path does not exist."""
    links: list[str] = []
    while os.path.lexists(path) and len(links) < _MAX_LINKS:
        link = _first_link(path)
        if link is None:
            return [*links, path]
        links.append(link)
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        path = os.path.normpath(target + path.removeprefix(link))
    return []


def _first_link(path: str) -> str | None:
    """Return the first part of a path that is a link."""
    parts = [*reversed(Path(path).parents), Path(path)]
    return next((str(part) for part in parts if part.is_symlink()), None)


MAX_FILES = 4096
"""Largest number of files and folders that a program may make."""
_OPEN_FILES = 128
_SEEN_PROCESSES = 1
"""Number of the sandbox's own processes that `usage_of` counts with a program in its own process namespace."""
_SLACK = 2
"""Factor on the limit of processes above which the library ends a run, if the kernel also limits the processes. The
library's count is not taken at one moment. It is too high if processes start and end quickly."""


def make_plan(
    mechanism: Mechanism,
    limits: Limits,
    program: Program,
    language: Language,
    scratch: str,
    handover: int | None = None,
) -> dict[str, Any]:
    """Return the parameters of the code inside the sandbox, as values that `marshal` can write.

    Args:
        scratch: Path of the scratch folder as the program sees it.
        handover: Descriptor of the socket through which the code inside sends descriptors to `Handover`.

    Raises:
        ValueError: A file of the program is outside of its scratch folder.
    """
    readable = [*SYSTEM_LIBRARIES, *language.readable]
    source = {} if program.command else {language.file_name: program.source.encode(errors="surrogatepass")}
    files = {**program.files, **source}
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ValueError(f"Files of a program must be inside of its scratch folder, and these are not: {outside}.")
    return {
        "namespaces": mechanism.namespaces,
        "needs_landlock": mechanism.name == "landlock",
        "newest_landlock": mechanism.newest_landlock,
        "readable": with_links([*readable, *program.readable]) if program.readable else readable,
        "devices": list(DEVICES),
        "scratch": scratch,
        "scratch_bytes": limits.scratch_mb << 20,
        "scratch_files": MAX_FILES,
        "files": files,
        "is_privileged": is_privileged(),
        "is_root": is_root(),
        "may_fork": _may_fork(mechanism),
        "user_number": threading.get_native_id(),
        "inherited": list(program.inherited),
        "limits": _kernel_limits(mechanism, limits),
        "arguments": list(program.command or [*language.command, *program.arguments]),
        "environment": {**_variables(scratch), **program.environment},
        "handover": handover,
        "port": program.port_inside,
    }


def _variables(scratch: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"}


def _may_fork(mechanism: Mechanism) -> bool:
    """Return whether the kernel can limit and end all processes of a program.

    The kernel does not limit root's processes, so root must be able to change to another user.
    """
    return mechanism.has_own_files and (is_privileged() or os.geteuid() != 0)


def max_threads(mechanism: Mechanism, limits: Limits) -> int:
    """Return the number of processes and threads, as `usage_of` counts them, above which a run is ended.

    If the kernel limits the processes too, `fork` fails earlier, and no program reaches this number.
    """
    if not _may_fork(mechanism):
        return limits.processes + (_SEEN_PROCESSES if mechanism.has_own_files else 0)
    return _SLACK * limits.processes + _SEEN_PROCESSES


def _own_processes(mechanism: Mechanism) -> int:
    """Return the number of processes of the sandbox that the kernel counts with the program's processes.

    The kernel counts the processes of one user in one user namespace. If root runs the library, the program gets its
    own user, which the first process inside shares except in bubblewrap, where it remains root. Otherwise a user
    namespace contains the first process inside and, without bubblewrap, also the process outside that waits for it.
    """
    if mechanism.namespaces == "outer":
        return 0 if is_privileged() else 1
    return 1 if is_privileged() else 2


def _kernel_limits(mechanism: Mechanism, limits: Limits) -> dict[str, int]:
    kernel_limits = {
        "AS": limits.memory_mb << 20,
        "CPU": max(1, round(limits.cpu_time_s + 0.5)),
        "FSIZE": limits.file_mb << 20,
        "NOFILE": _OPEN_FILES,
        **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0),
    }
    if _may_fork(mechanism):
        kernel_limits["NPROC"] = limits.processes + _own_processes(mechanism)
    return kernel_limits
