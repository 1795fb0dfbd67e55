"""Check within seconds whether a Ray cluster answers at RAY_ADDRESS.

Ray's own attempt to join an address where no cluster answers takes minutes and ignores signals. Invariant: Ray joins
only a cluster that has answered this check, and every step of the check has a deadline.
"""

import os
import socket
import subprocess
import sys
from functools import partial

from nemo_rl.host.boundary import in_background
from nemo_rl.utils.addresses import VARIABLE, cluster_address
from nemo_rl.utils.errors import ConfigError

START_ONE = (
    "Start it (ray start --head there, ray start --address=... on the other nodes), correct RAY_ADDRESS, or unset it "
    "to run on this machine alone."
)
_REACH_S = 10.0
"""Time limit in seconds for name resolution and all addresses of a host together."""
_CONNECT_S = 5.0
_HEALTH_S = 20.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 (gRPC) client: the preface and an empty SETTINGS frame (RFC 9113, 3.4)."""
_FRAME_HEADER_BYTES, _SETTINGS_FRAME = 9, 4

_answered: set[str] = set()


def require_cluster() -> None:
    """Refuse a RAY_ADDRESS without a Ray cluster. Each address is checked once per process.

    Raises:
        ConfigError: no Ray cluster answers there. The message describes what was found.
    """
    address = cluster_address()
    if address is None or address in _answered:
        return
    trouble = unreachable(address)
    if trouble is not None:
        raise ConfigError(f"{VARIABLE}={address}: {trouble}. {START_ONE}")
    _answered.add(address)


def unreachable(address: str) -> str | None:
    """Return why a cluster cannot be joined, within about half a minute. Return None if it can.

    Args:
        address: `host:port`, `ray://host:port` or `auto`.
    """
    try:
        target = in_background(partial(_listening, address), "ray-address").result(_REACH_S)
    except TimeoutError:
        return f"no server answers (no connection within {_REACH_S:g} s; the host is unknown to the network or blocked)"
    except (OSError, ValueError) as error:
        return f"no server answers ({error})"
    if target is None:
        return "no cluster runs on this machine"
    if address.startswith("ray://"):
        return None
    # # A separate process is used, because a wait inside Ray's C++ code cannot be interrupted here.
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", target]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_HEALTH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the server there is not Ray, or did not answer within {_HEALTH_S:g} s"
    said = asked.stderr.strip().splitlines()
    return None if asked.returncode == 0 else f"the server there is not Ray ({said[-1] if said else 'silent'})"


def _listening(address: str) -> str | None:
    """Return `host:port` of a server that uses the gRPC protocol, or None if `auto` finds no cluster."""
    from ray._private import services  # slow import

    try:
        # # Ray replaces 127.0.0.1 with the address at which other machines reach this one.
        target: str | None = services.canonicalize_bootstrap_address(address.removeprefix("ray://"))
    except ConnectionError:  # raised for `auto`
        return None
    if target is None:
        return None
    host, _, port = target.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
    except OSError as error:
        raise ConnectionError(f"{target}: {error.strerror or error}") from error
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
            _require_http2(connection)
    return target


def _require_http2(connection: socket.socket) -> None:
    connection.settimeout(_CONNECT_S)
    try:
        connection.sendall(_HTTP2_PREFACE)
        header = b""
        while len(header) < _FRAME_HEADER_BYTES:
            received = connection.recv(_FRAME_HEADER_BYTES - len(header))
            if not received:
                raise ConnectionError("the server there closes the connection: it is not Ray")
            header += received
    except TimeoutError:
        raise ConnectionError(
            f"the server there does not respond for {_CONNECT_S:g} s: it is not Ray, or it hangs"
        ) from None
    if header[3] != _SETTINGS_FRAME:
        raise ConnectionError("another kind of server listens there, not Ray")
