"""A Ray cluster of several nodes on this machine: each raylet has its own id and loopback address."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private.node import Node
from ray.cluster_utils import Cluster

from nemo_rl.host.stop_signals import handlers_kept

FIRST_ADDRESS = 2
"""Of the last number of the nodes' addresses; Ray replaces 127.0.0.1 by one that the network can reach."""


class RayNodes:
    """Nodes 127.0.0.2, 127.0.0.3 and so on; the first is the head. They end with this process.

    Args:
        system_config: Ray's settings, for example `health_check_period_ms`.
    """

    def __init__(self, **system_config: Any) -> None:
        self._system_config = system_config
        self._cluster = Cluster()
        self._nodes: list[Node] = []

    @property
    def address(self) -> str:
        """Value for RAY_ADDRESS."""
        return str(self._cluster.address)

    def add(self, num_cpus: int, num_gpus: int = 0) -> str:
        """Start a node and return its address. GPUs are only counted; no device has to exist."""
        address = f"127.0.0.{FIRST_ADDRESS + len(self._nodes)}"
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "node_ip_address": address}
        if not self._nodes:
            options |= {"include_dashboard": False, "no_monitor": True, "_system_config": self._system_config}
        with handlers_kept():
            self._nodes.append(self._cluster.add_node(include_log_monitor=False, **options))
        return address

    def kill(self, address: str) -> None:
        """Kill the raylet of a node with SIGKILL; its workers exit too, as after a power failure."""
        node = next(node for node in self._nodes if node.node_ip_address == address)
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all nodes."""
        for node in reversed(self._nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextmanager
def ray_nodes(*num_cpus: int, num_gpus: int = 0, **system_config: Any) -> Iterator[RayNodes]:
    """Return a cluster whose nodes have the given numbers of CPUs; settings of Ray are given by name."""
    nodes = RayNodes(**system_config)
    try:
        for number in num_cpus:
            nodes.add(number, num_gpus)
        yield nodes
    finally:
        nodes.close()
