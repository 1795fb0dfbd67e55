"""Report the load of every node of a run during training.

    a Ray of the run alone      one machine: a thread of this process reads it
    a joined cluster            an actor without resources reads each node, and the thread asks the actors

Invariant: a failure of the monitor, or of a tracker that logs its readings, does not end or delay the run. Values that
could not be read or logged are missing.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config import LoggerConfig
from nemo_rl.config.base.names import MACHINE_METRICS
from nemo_rl.distributed.cluster.node_choice import living_nodes
from nemo_rl.host.boundary import Boundary
from nemo_rl.host.machine_load import MachineLoad
from nemo_rl.utils.addresses import cluster_address

logger = logging.getLogger(__name__)

STEP_METRIC = f"{MACHINE_METRICS}/ray_step"
_ANSWER_S = 5.0
"""Seconds to wait for the answers of a round. A later answer belongs to the next round."""
_MOST_STARTS = 3
_STOP_S = 1.0


class Readings(Protocol):
    """Interface that reads the load of nodes."""

    def __call__(self) -> Mapping[int, Mapping[str, float]]:
        """Return the load of each node by node number."""


class Metrics(Protocol):
    """Interface that logs the readings, as `utils.logger.Logger` does."""

    train_step: int

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str = "", step_metric: str | None = None
    ) -> None:
        """Log readings that were taken at the same time."""


class _NodeReader:
    """The actor on one node that reads its load."""

    def __init__(self) -> None:
        self._load = MachineLoad(os.getppid())  # the raylet, the parent of all workers of the node

    def read(self) -> dict[str, float]:
        """Return the load of this node."""
        return self._load.read()


class OwnMachine:
    """Read the load of the machine of this process."""

    def __init__(self) -> None:
        self._load = MachineLoad(os.getpid())

    def __call__(self) -> dict[int, dict[str, float]]:
        """Return the readings of this machine, with the index 0."""
        return {0: self._load.read()}


class ClusterNodes:
    """Read the load of all living nodes of a joined cluster. A node keeps its number. A new node gets the next one.

    A node has at most one open call, so calls do not accumulate at a slow node.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._readers: dict[str, Any] = {}
        self._open: dict[str, Any] = {}

    def __call__(self) -> dict[int, dict[str, float]]:
        """Return the readings, or nothing after Ray was shut down, because a call would start it again."""
        if not ray.is_initialized():
            return {}
        living = [node.node_id for node in living_nodes()]
        for gone in self._readers.keys() - living:
            self._forget(gone)
        for node_id in living:
            self._ask(node_id)
        nodes = {call: node_id for node_id, call in self._open.items()}
        answered, _ = ray.wait(list(nodes), num_returns=len(nodes), timeout=_ANSWER_S) if nodes else ([], [])
        found: dict[int, dict[str, float]] = {}
        for call in answered:
            node_id = nodes[call]
            del self._open[node_id]
            try:
                found[self._numbers[node_id]] = ray.get(call)
            except RayError as error:
                logger.debug("The monitor of node %s is lost: %s", node_id, error)
                self._forget(node_id)
        return found

    def _ask(self, node_id: str) -> None:
        """Ask for a reading of a node, unless an earlier call is open or its reader cannot be started."""
        self._numbers.setdefault(node_id, len(self._numbers))
        if node_id not in self._readers and self._starts.get(node_id, 0) < _MOST_STARTS:
            self._starts[node_id] = self._starts.get(node_id, 0) + 1
            self._readers[node_id] = _start_reader(node_id)
        if node_id in self._readers and node_id not in self._open:
            self._open[node_id] = self._readers[node_id].read.remote()

    def _forget(self, node_id: str) -> None:
        self._readers.pop(node_id, None)
        self._open.pop(node_id, None)


def _start_reader(node_id: str) -> Any:
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_NodeReader)
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


@dataclass
class MachineMonitor:
    """Read the load of nodes at intervals in a separate thread, and log it under `ray/`.

    The x-axis is the time since the start in seconds. `train_step` is the newest logged training step.
    """

    readings: Readings
    """Reader of the nodes' load."""
    metrics: Metrics
    """Logger of the readings."""
    collection_s: float
    """Seconds between two readings of a node."""
    flush_s: float
    """Seconds between two logs of readings."""
    _kept: list[tuple[int, dict[str, float]]] = field(default_factory=list, init=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _told: set[str] = field(default_factory=set, init=False)

    def start(self) -> None:
        """Start to read."""
        self._thread = threading.Thread(target=self._run, name="machine-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Log all finished readings and end. A reading that is still running is not waited for and not logged."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        while self._log_next():
            pass

    def _run(self) -> None:
        began = flushed = time.monotonic()
        while not self._stopped.wait(self.collection_s):
            self._collect(began)
            if time.monotonic() - flushed >= self.flush_s:
                flushed = time.monotonic()
                while not self._stopped.is_set() and self._log_next():
                    pass

    def _collect(self, began: float) -> None:
        with Boundary(Exception) as caught:  # a failed reading must not disturb the run
            nodes = self.readings()
        if caught:
            self._tell_once("read", caught.take())
            return
        found = {f"node.{number}.{name}": value for number, load in nodes.items() for name, value in load.items()}
        if found:
            found["train_step"] = float(self.metrics.train_step)
            with self._guard:
                self._kept.append((round(time.monotonic() - began), found))

    def _log_next(self) -> bool:
        """Log the oldest reading, and return whether there was one."""
        with self._guard:
            if not self._kept:
                return False
            seconds, found = self._kept.pop(0)
        with Boundary(Exception) as caught:  # trackers may raise any error
            self.metrics.log_metrics(found, seconds, MACHINE_METRICS, STEP_METRIC)
        if caught:
            self._tell_once("logged", caught.take())
        return True

    def _tell_once(self, what: str, error: Exception) -> None:
        if what not in self._told:
            logger.warning("The load of the machines cannot be %s (%s); training continues.", what, error)
        self._told.add(what)


@contextmanager
def monitored(config: LoggerConfig, metrics: Metrics) -> Iterator[None]:
    """Report the load of the machines during a block if `logger.monitor_gpus` is set."""
    if not config.monitor_gpus:
        yield
        return
    readings: Readings = ClusterNodes() if cluster_address() else OwnMachine()
    intervals = config.gpu_monitoring
    monitor = MachineMonitor(readings, metrics, intervals.collection_interval, intervals.flush_interval)
    monitor.start()
    try:
        yield
    finally:
        monitor.stop()
