"""Join a Ray cluster and notice when a process of it that this program needs has ended.

        raylet        of this program's machine: when it ends, Ray ends all workers, each with a different reason
        gcs_server    on the head: when it has not answered for a minute, Ray ends this process from C++

Then `local_ray.check_local_ray`, which every long wait calls, ends the run in order. Other machines are not watched
here: `node_health` and the workers' errors report them.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray._private.node import Node

from nemo_rl.distributed.cluster.local_ray import connected_within, expect_deaths, note_death
from nemo_rl.host.background import in_background
from nemo_rl.utils.addresses import VARIABLE, cluster_address
from nemo_rl.utils.errors import ConfigError, NemoRLError

START_ONE = (
    "Start it (ray start --head there, ray start --address=... on the other nodes), correct RAY_ADDRESS, or unset it "
    "to run on this machine alone."
)
_REACH_S = 10.0
"""Seconds for name resolution and all addresses of a host together."""
_CONNECT_S = 5.0
_HEALTH_S = 20.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 (gRPC) client: the preface and an empty SETTINGS frame (RFC 9113, 3.4)."""
_FRAME_HEADER_BYTES, _SETTINGS_FRAME = 9, 4

_answered: set[str] = set()


def require_cluster() -> None:
    """Refuse a RAY_ADDRESS where no Ray cluster answers; checks each address once per process.

    Raises:
        ConfigError: describes what was found there.
    """
    address = cluster_address()
    if address is None or address in _answered:
        return
    trouble = unreachable(address)
    if trouble is not None:
        raise ConfigError(f"{VARIABLE}={address}: {trouble}. {START_ONE}")
    _answered.add(address)


def unreachable(address: str) -> str | None:
    """Describe why a cluster cannot be joined, within about half a minute; None if it can.

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
    # Use a separate process: a wait inside Ray's C++ code cannot be interrupted here.
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", target]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_HEALTH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the server there is not Ray, or did not answer within {_HEALTH_S:g} s"
    said = asked.stderr.strip().splitlines()
    return None if asked.returncode == 0 else f"the server there is not Ray ({said[-1] if said else 'silent'})"


def _listening(address: str) -> str | None:
    """Return `host:port` of a server that speaks gRPC's protocol; None if `auto` finds no cluster.

    Raises:
        OSError, ValueError: no process listens, the address is malformed, or the server is not Ray.
    """
    from ray._private import services  # takes a second

    try:
        # Ray replaces 127.0.0.1 by the address at which other machines reach this one.
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


_RETRY_S = 0.2
_PERIOD_S = 3.0
_GONE_S = 0.75 * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
"""Seconds that the control service may not answer: less than Ray's own limit, and enough for it to restart."""
_GO_ON = "Start the run again; with checkpointing.enabled=true it continues from its last checkpoint."

_JOIN_S = 120.0


def join_ray(address: str, env_vars: Mapping[str, str], *, log_to_driver: bool) -> Any:
    """Connect this process to a running cluster and watch the cluster from then on.

    Args:
        address: `host:port`, `ray://host:port` or `auto`; a cluster has answered there.
        env_vars: environment of all workers.
        log_to_driver: repeat what workers write on this process's console.

    Returns:
        What `ray.init` returns.

    Raises:
        ConfigError: Ray refuses to join.
        DeadlineExceededError: it does not connect in time.
    """
    start = partial(
        ray.init,
        address=address,
        runtime_env={"env_vars": dict(env_vars)},
        log_to_driver=log_to_driver,
        logging_level=logging.WARNING,
    )
    try:
        context = connected_within(start, _JOIN_S, f"Ray did not join RAY_ADDRESS={address}", START_ONE)
    except NemoRLError:
        raise
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray refuses to join RAY_ADDRESS={address}: {error} {START_ONE}") from error
    watch_joined_ray()
    return context


def watch_joined_ray() -> None:
    """Start a thread for the raylet and one for the gcs_server; with Ray Client this process reaches neither."""
    node = ray._private.worker._global_node
    if node is None:
        return
    expect_deaths()
    threads: dict[str, Callable[[Node], None]] = {"raylet": _await_raylet, "gcs_server": _await_control_service}
    for name, wait in threads.items():
        threading.Thread(target=wait, args=(node,), name=f"{name}-watch", daemon=True).start()


def _await_raylet(node: Node) -> None:
    """Wait until no process listens on the raylet's socket (the kernel reports it) or this process has left."""
    while ray._private.worker.global_worker.node is node:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(node.raylet_socket_name)
                connection.recv(1)
        except (ConnectionRefusedError, FileNotFoundError):
            place = f"{node.node_ip_address}, in the joined cluster {node.gcs_address},"
            what = f"The node manager (raylet) of this machine, {place}"
            logs = f"Its log is in {node.get_logs_dir_path()}."
            note_death(node, f"{what} has ended, and the run's workers with it. {logs} {_GO_ON}")
            return
        except OSError:
            pass  # the connection was closed; the next attempt shows why
        time.sleep(_RETRY_S)


def _await_control_service(node: Node) -> None:
    """Wait until it accepts no connection for `_GONE_S` seconds or this process has left the cluster."""
    host, _, port = node.gcs_address.rpartition(":")
    answered = time.monotonic()
    while ray._private.worker.global_worker.node is node:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PERIOD_S).close()
            answered = time.monotonic()
        except OSError as error:
            if time.monotonic() - answered > _GONE_S:
                what = f"The control service (gcs_server) of the joined cluster, {node.gcs_address},"
                reason = f"{what} has not answered for {_GONE_S:g} s ({error.strerror or error})"
                note_death(node, f"{reason}: Ray on the head has ended, or its machine is lost. {_GO_ON}")
                return
        time.sleep(_PERIOD_S)
