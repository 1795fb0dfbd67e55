"""Report the load of every node of a run while it trains.

    a Ray of the run alone      one machine: a thread of this process reads it
    a joined cluster            an actor without resources reads each node, and the thread asks them

Invariant: a failure of the monitor ends nothing and delays nothing; what it could not read is missing.
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
from nemo_rl.distributed.cluster.node_choice import living_nodes
from nemo_rl.host.machine_load import MachineLoad
from nemo_rl.utils.cluster_address import cluster_address

logger = logging.getLogger(__name__)

PREFIX = "ray"
STEP_METRIC = "ray/ray_step"
_ANSWER_S = 5.0
"""Seconds that a node may take for one reading; a later answer is dropped."""
_MOST_STARTS = 3
_STOP_S = 1.0


class Readings(Protocol):
    """Reads the load of nodes."""

    def __call__(self) -> Mapping[int, Mapping[str, float]]:
        """Return the load of each node by its number."""


class Metrics(Protocol):
    """Takes the readings; `utils.logger.Logger`."""

    train_step: int

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str = "", step_metric: str | None = None
    ) -> None:
        """Log the readings of one moment."""


class _NodeReader:
    """The actor of one node."""

    def __init__(self) -> None:
        self._load = MachineLoad(os.getppid())  # the raylet, which starts all workers of the node

    def read(self) -> dict[str, float]:
        """Return the load of this node."""
        return self._load.read()


class OwnMachine:
    """Reads the machine of this process."""

    def __init__(self) -> None:
        self._load = MachineLoad(os.getpid())

    def __call__(self) -> dict[int, dict[str, float]]:
        """See `Readings`."""
        return {0: self._load.read()}


class ClusterNodes:
    """Reads all living nodes of a joined cluster; nodes keep their numbers, and new ones get the next."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._readers: dict[str, Any] = {}

    def __call__(self) -> dict[int, dict[str, float]]:
        """See `Readings`."""
        living = [node.node_id for node in living_nodes()]
        for node_id in living:
            self._numbers.setdefault(node_id, len(self._numbers))
            if node_id not in self._readers and self._starts.get(node_id, 0) < _MOST_STARTS:
                self._starts[node_id] = self._starts.get(node_id, 0) + 1
                self._readers[node_id] = _start_reader(node_id)
        calls = {self._readers[node_id].read.remote(): node_id for node_id in living if node_id in self._readers}
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S) if calls else ([], [])
        found: dict[int, dict[str, float]] = {}
        for call in answered:
            try:
                found[self._numbers[calls[call]]] = ray.get(call)
            except RayError as error:
                logger.debug("The monitor of node %s is lost: %s", calls[call], error)
                del self._readers[calls[call]]
        return found


def _start_reader(node_id: str) -> Any:
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_NodeReader)
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


@dataclass
class MachineMonitor:
    """Reads the load of nodes from time to time on a thread of its own, and logs it under `ray/`.

    The x-axis is the time since the start in seconds; `train_step` is the newest training step that was logged.

    Attributes:
        readings: reads the nodes.
        metrics: takes the readings.
        collection_s: seconds between two readings.
        flush_s: seconds after which readings are logged.
    """

    readings: Readings
    metrics: Metrics
    collection_s: float
    flush_s: float
    _kept: list[tuple[int, dict[str, float]]] = field(default_factory=list, init=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _has_failed: bool = field(default=False, init=False)

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="machine-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Log what was read, and end; a reading that takes long is not waited for."""
        self._stopped.set()
        self._thread.join(_STOP_S)
        self._flush()

    def _run(self) -> None:
        began = flushed = time.monotonic()
        while not self._stopped.wait(self.collection_s):
            self._collect(began)
            if time.monotonic() - flushed >= self.flush_s:
                flushed = time.monotonic()
                self._flush()

    def _collect(self, began: float) -> None:
        try:
            nodes = self.readings()
        except Exception as error:  # boundary: no failure of a reading may end or disturb the run
            if not self._has_failed:
                logger.warning("The load of the machines cannot be read (%s); training continues.", error)
            self._has_failed = True
            return
        found = {f"node.{number}.{name}": value for number, load in nodes.items() for name, value in load.items()}
        if found:
            found["train_step"] = float(self.metrics.train_step)
            with self._guard:
                self._kept.append((round(time.monotonic() - began), found))

    def _flush(self) -> None:
        with self._guard:
            kept, self._kept = self._kept, []
        for seconds, found in kept:
            self.metrics.log_metrics(found, seconds, PREFIX, STEP_METRIC)


@contextmanager
def monitored(config: LoggerConfig, metrics: Metrics) -> Iterator[None]:
    """Report the load of the machines during a block, if `logger.monitor_gpus` asks for it."""
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
