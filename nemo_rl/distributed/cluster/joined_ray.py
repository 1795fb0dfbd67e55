"""Join a Ray cluster, and notice the end of those of its processes that this program needs.

        raylet        of this program's machine: when it ends, Ray ends all workers, each with a different reason
        gcs_server    on the head: when it has not answered for a minute, Ray ends this process from C++

After one of these has ended, `local_ray.check_local_ray`, which every long wait calls, ends the run in order. Other
machines are not watched here. `node_health` and the workers' errors report their loss.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray._private.node import Node

from nemo_rl.distributed.cluster.address import START_ONE
from nemo_rl.distributed.cluster.local_ray import connected_within, expect_deaths, note_death
from nemo_rl.utils.errors import ConfigError, NemoRLError

_RETRY_S = 0.2
_PERIOD_S = 3.0
_GONE_S = 0.75 * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
"""Seconds for which the control service may be silent. They are less than Ray's limit and enough for a restart."""
_GO_ON = "Start the run again; with checkpointing.enabled=true it continues from its last checkpoint."

_JOIN_S = 120.0


def join_ray(address: str, env_vars: Mapping[str, str], *, log_to_driver: bool) -> Any:
    """Connect this process to a running cluster, and watch the cluster from then on.

    Args:
        address: `host:port`, `ray://host:port` or `auto`, where a cluster has answered.
        env_vars: environment of all workers.
        log_to_driver: show the workers' output on this process's console.

    Returns:
        The result of `ray.init`.

    Raises:
        ConfigError: Ray refuses to join.
        DeadlineExceededError: the process does not connect in time.
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
    """Start a thread for the raylet and a thread for the gcs_server, unless the process uses Ray Client."""
    node = ray._private.worker._global_node
    if node is None:
        return
    expect_deaths()
    threads: dict[str, Callable[[Node], None]] = {"raylet": _await_raylet, "gcs_server": _await_control_service}
    for name, wait in threads.items():
        threading.Thread(target=wait, args=(node,), name=f"{name}-watch", daemon=True).start()


def _await_raylet(node: Node) -> None:
    """Wait until no process listens on the raylet's socket, as the kernel reports, or this process has left Ray."""
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
            pass  # the connection was closed; the next attempt shows the reason
        time.sleep(_RETRY_S)


def _await_control_service(node: Node) -> None:
    """Wait until the control service accepts no connections for `_GONE_S` seconds, or this process has left Ray."""
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
