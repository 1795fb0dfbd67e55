"""Find out within milliseconds, without Ray, why a local Ray cannot start on this machine.

A run's preflight, `local_ray` and `nemo_rl doctor` use it. Invariant: the check starts no process and leaves no file.
"""

import os
import socket
import tempfile
from datetime import datetime
from pathlib import Path

from nemo_rl.files.folders import require_own
from nemo_rl.utils.errors import ConfigError

_LONGEST_SOCKET_BYTES = 107
"""Longest path of a socket on Linux (`sockaddr_un`)."""
_LONGEST_SOCKET = "sockets/plasma_store"
_LOOPBACK_S = 5.0
_CHOOSE = "Set RAY_TMPDIR to a folder that only this user may write."


def require_startable_ray() -> None:
    """Raise an error if Ray cannot start on this machine.

    Raises:
        ConfigError: Ray cannot start. The message names the fault and the fix.
    """
    fault = start_fault()
    if fault is not None:
        raise ConfigError(f"Ray cannot start on this machine: {fault[0]}. {fault[1]}")


def start_fault() -> tuple[str, str] | None:
    """Return why Ray cannot start and how to fix this, or None if no fault is found."""
    return _temporary_folder_fault() or _loopback_fault()


def ray_folder() -> Path:
    """Return the folder with the sockets, logs and spilled objects of a Ray started on this machine.

    Ray makes the folder writable for all users, so its parent is a private folder of this user (`files.folders`).
    """
    chosen = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()
    own = f"ray-{os.getuid()}"
    return (chosen if chosen.name == own else chosen / own) / "ray"


def own_ray_folder() -> Path:
    """Return `ray_folder`. Its parent exists and is private.

    Raises:
        ConfigError: another user owns the parent, or may write to it.
    """
    folder = ray_folder()
    require_own(folder.parent, _CHOOSE)
    return folder


def _temporary_folder_fault() -> tuple[str, str] | None:
    folder = ray_folder()
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") or not os.environ.get("TMPDIR") else "TMPDIR"
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    excess = len(os.fsencode(folder / session / _LONGEST_SOCKET)) - _LONGEST_SOCKET_BYTES
    if excess > 0:
        found = f"{variable} makes the paths of its sockets {excess} bytes too long: {folder.parents[1]}"
        return found, f"Set RAY_TMPDIR to a folder whose path is at least {excess} bytes shorter, such as /tmp."
    if os.path.lexists(folder.parent):
        try:
            own_ray_folder()
        except ConfigError as error:
            return str(error).removesuffix(f". {_CHOOSE}"), _CHOOSE
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        found = f"its folder {folder} cannot be written ({error.strerror or error})"
        return found, "Set RAY_TMPDIR to a folder that this user may write, with a gigabyte of free space."
    return None


def _loopback_fault() -> tuple[str, str] | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_LOOPBACK_S)
            with socket.create_connection(server.getsockname(), _LOOPBACK_S):
                server.accept()[0].close()
    except OSError as error:
        found = f"this machine does not reach itself under 127.0.0.1 ({error.strerror or error})"
        return found, "Switch the loopback interface on (ip link set lo up), or start the container with a network."
    return None
