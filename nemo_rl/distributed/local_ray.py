"""Start Ray on this machine for one run, with no more processes than a run uses.

Called by `virtual_cluster.init_ray` when there is no cluster to join. Law: what is left out serves people who
look at a cluster from outside or machines that come and go; actors, tasks and objects work as ever.

    gcs_server, raylet, two agents of the raylet     started by Ray, needed
    autoscaler monitor, log monitor, dashboard       left out: 300 MB and seconds of a laptop's start
    an idle worker for each core                     left out: a run knows which workers it wants
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

LOOPBACK = "127.0.0.1"
_CPU_OBJECT_STORE_BYTES = 1 << 30
_UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server")
_SYSTEM_CONFIG = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}


def start_local_ray(
    *, num_cpus: int | None, env_vars: Mapping[str, str], include_dashboard: bool, log_to_driver: bool
) -> Any:
    """Start Ray under 127.0.0.1; it ends with this process.

    Args:
        num_cpus: logical CPUs; None counts the machine's.
        env_vars: environment of all workers, on top of this process's own.
        include_dashboard: start the dashboard, and the daemons around it.
        log_to_driver: repeat what workers write on this process's console.

    Returns:
        What `ray.init` returns.
    """
    # Without this Ray replaces 127.0.0.1 by an address that the network can reach, and all of its processes
    # listen there. The variable tells its other processes the same.
    ray_constants.ENABLE_RAY_CLUSTER = False
    unused = () if include_dashboard or log_to_driver else _UNUSED_DAEMONS
    # Workers inherit the environment that Ray starts in.
    with (
        _environment({**env_vars, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}),
        _replaced(Node, dict.fromkeys(unused, _start_nothing)),
        _replaced(services, {"ConsolePopen": _OwnSession}),
        # Ray's handler would drain the node for seconds while it starts.
        _replaced(ray_utils, {"set_sigterm_handler": _keep_handler}),
    ):
        return ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=include_dashboard,
            object_store_memory=_object_store_bytes(),
            log_to_driver=log_to_driver,
            logging_level=logging.WARNING,
            _node_ip_address=LOOPBACK,
            _system_config=_SYSTEM_CONFIG,
        )


class _OwnSession(services.ConsolePopen):
    """A daemon of Ray's that no signal to the run's terminal or process group reaches.

    Ctrl-C, a closed terminal and `kill -- -<group>` then reach the driver alone, which ends the rest in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, start_new_session=True, **kwargs)


@contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Change a part of Ray while it starts; there is no public switch for these."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _keep_handler(handler: Any) -> None:
    """In place of the function that makes Ray handle SIGTERM: the program has a handler."""


def _start_nothing(node: Node, **_: Any) -> None:
    """In place of a method that starts a daemon."""


@contextmanager
def _environment(env_vars: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env_vars}
    os.environ.update(env_vars)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _object_store_bytes() -> int | None:
    """1 GiB, or 30 % of a small machine's memory; None (Ray's own rule) where there are GPUs."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CPU_OBJECT_STORE_BYTES, int(0.3 * memory))
