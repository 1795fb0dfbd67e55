"""Define the mechanisms that isolate a program from the machine.

    bubblewrap   namespaces made by `bwrap`; inside them seccomp, limits, and Landlock where the kernel has it
    landlock     Landlock, seccomp and limits; and namespaces of our own where this process may make them. Without
                 namespaces it needs a Landlock that restricts truncation (version 3, Linux 6.2)

Invariant: a mechanism counts as available only after a program ran in it, so a sandbox never runs unprotected.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.sandbox.program import DEVICES

type MechanismName = Literal["bubblewrap", "landlock"]
type Choice = Literal["auto", "bubblewrap", "landlock"]

_NEEDED_CAPABILITIES = 1 << 6 | 1 << 7 | 1 << 21  # CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN

SCRATCH = "/scratch"
"""Path of the scratch folder as a program sees it, if the program has its own root folder."""


@dataclass(frozen=True)
class Mechanism:
    """Mechanism that isolates a program."""

    name: MechanismName
    """Value of the configuration key that chooses the mechanism."""
    namespaces: Literal["outer", "own", "none"]
    """Origin of the namespaces: "outer" (bubblewrap), "own" (the code in `jail`), or "none" if there are none."""
    newest_landlock: int | None = None
    """Newest version of Landlock's rules to apply, 0 for no rules, or None for the version of the kernel."""

    @property
    def has_own_files(self) -> bool:
        """True if programs have their own root folder, with a scratch folder in memory."""
        return self.namespaces != "none"

    def wrap(self, command: Sequence[str], readable: Sequence[str], info: int) -> list[str]:
        """Return the command line that runs a command in bubblewrap, or the command itself for other mechanisms.

        Args:
            command: The command that completes the isolation from the inside.
            readable: Paths that have to be visible inside.
            info: File descriptor on which bubblewrap reports the process id of its first process.
        """
        if self.namespaces != "outer":
            return list(command)
        # bubblewrap closes the folders that it makes by itself, as parents of a path, to other users.
        folders = sorted({str(folder) for path in readable for folder in Path(path).parents} - {"/"})
        binds = [part for folder in folders for part in ("--dir", folder)]
        binds += [part for path in dict.fromkeys(readable) for part in _bind(path)]
        devices = [part for path in DEVICES for part in ("--dev-bind-try", path, path)]
        # Root keeps its user here, so that it can change to another user later. Other users need a user namespace.
        users = ["--cap-add", "ALL"] if is_privileged() else ["--unshare-user", "--cap-add", "CAP_SYS_ADMIN"]
        unshared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        bwrap = shutil.which("bwrap") or "bwrap"
        return [
            *[bwrap, "--die-with-parent", "--clearenv", "--info-fd", str(info), *users, *unshared, *binds],
            *["--tmpfs", "/dev", *devices, "--remount-ro", "/dev", "--dir", SCRATCH, "--remount-ro", "/"],
            *["--chdir", "/", "--", *command],
        ]


def is_privileged() -> bool:
    """Return whether this process is root with the capabilities to mount and to change its user."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return is_root() and held & _NEEDED_CAPABILITIES == _NEEDED_CAPABILITIES


def is_root() -> bool:
    """Return whether this process is root. Its programs then run as another user."""
    return os.geteuid() == 0


def _bind(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind-try", path, path]


BUBBLEWRAP = Mechanism("bubblewrap", "outer")
LANDLOCK = Mechanism("landlock", "own")
LANDLOCK_ALONE = Mechanism("landlock", "none")
IN_ORDER = (BUBBLEWRAP, LANDLOCK, LANDLOCK_ALONE)
"""All mechanisms, beginning with the strongest."""
