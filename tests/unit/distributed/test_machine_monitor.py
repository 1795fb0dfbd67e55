"""The monitor logs readings of nodes from a thread, and no failure of it reaches the run."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray_nodes import ray_nodes

from nemo_rl.config import LoggerConfig
from nemo_rl.distributed.cluster import machine_monitor
from nemo_rl.distributed.cluster.machine_monitor import ClusterNodes, MachineMonitor, monitored
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.utils.logger import Logger


class Taken:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.train_step = 3
        self.rows: list[tuple[dict[str, Any], int, str, str | None]] = []

    def log_metrics(self, metrics: Any, step: int, prefix: str = "", step_metric: str | None = None) -> None:
        self.rows.append((dict(metrics), step, prefix, step_metric))


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.fast
def test_readings_have_the_number_of_their_node_and_the_training_step() -> None:
    taken = Taken()
    monitor = MachineMonitor(lambda: {0: {"mem_gb": 1.0}, 1: {"gpu.0.util": 50.0}}, taken, 0.05, 0.05)
    monitor.start()
    until(lambda: taken.rows)
    monitor.stop()
    metrics, _, prefix, step_metric = taken.rows[0]
    assert metrics == {"node.0.mem_gb": 1.0, "node.1.gpu.0.util": 50.0, "train_step": 3.0}
    assert (prefix, step_metric) == ("ray", "ray/ray_step")


@pytest.mark.fast
def test_readings_are_kept_until_they_are_due_and_the_end_loses_none() -> None:
    taken, calls = Taken(), []
    monitor = MachineMonitor(lambda: {0: {"reading": float(len(calls))}}, taken, 0.02, 1000.0)
    monitor.readings = lambda: (calls.append(1), {0: {"reading": float(len(calls))}})[1]
    monitor.start()
    until(lambda: len(calls) >= 3)
    assert not taken.rows
    monitor.stop()
    assert [row[0]["node.0.reading"] for row in taken.rows] == [float(n + 1) for n in range(len(calls))]


@pytest.mark.fast
def test_a_reading_that_fails_is_told_once_and_later_ones_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    taken, calls = Taken(), []

    def read() -> dict[int, dict[str, float]]:
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("no such counter")
        return {0: {"mem_gb": 2.0}}

    monitor = MachineMonitor(read, taken, 0.02, 0.02)
    with caplog.at_level(logging.WARNING, "nemo_rl"):
        monitor.start()
        until(lambda: taken.rows)
        monitor.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "The load of the machines cannot be read (no such counter); training continues."
    ]


@pytest.mark.fast
def test_a_reading_that_hangs_does_not_hold_up_the_end() -> None:
    began, release = threading.Event(), threading.Event()

    def read() -> dict[int, dict[str, float]]:
        began.set()
        release.wait(30)
        return {}

    monitor = MachineMonitor(read, Taken(), 0.01, 0.01)
    monitor.start()
    assert began.wait(10)
    started = time.monotonic()
    monitor.stop()
    assert time.monotonic() - started < 5
    release.set()


@pytest.mark.fast
def test_a_reading_that_returns_after_the_end_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_monitor, "_STOP_S", 0.05)
    taken, began, release = Taken(), threading.Event(), threading.Event()

    def read() -> dict[int, dict[str, float]]:
        began.set()
        release.wait(30)
        return {0: {"mem_gb": 1.0}}

    monitor = MachineMonitor(read, taken, 0.01, 0.0)
    monitor.start()
    assert began.wait(10)
    thread = monitor._thread
    assert thread is not None
    monitor.stop()
    release.set()
    thread.join(10)
    assert not thread.is_alive() and taken.rows == []


@pytest.mark.fast
def test_a_tracker_that_fails_ends_neither_the_monitor_nor_the_run(caplog: pytest.LogCaptureFixture) -> None:
    taken, calls = Taken(), []

    class Failing(Taken):
        def log_metrics(self, metrics: Any, step: int, prefix: str = "", step_metric: str | None = None) -> None:
            calls.append(step)
            if len(calls) != 3:
                raise KeyError("the run was deleted")
            taken.log_metrics(metrics, step, prefix, step_metric)

    monitor = MachineMonitor(lambda: {0: {"mem_gb": 1.0}}, Failing(), 0.02, 0.02)
    with caplog.at_level(logging.WARNING, "nemo_rl"):
        monitor.start()
        until(lambda: len(calls) >= 4)
        monitor.stop()
    assert len(taken.rows) == 1
    assert caplog.messages == ["The load of the machines cannot be logged ('the run was deleted'); training continues."]


@pytest.mark.fast
def test_a_monitor_that_was_never_started_can_be_stopped() -> None:
    MachineMonitor(dict, Taken(), 1.0, 1.0).stop()


@pytest.mark.fast
def test_no_node_is_asked_after_ray_was_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would start a Ray of its own. Another module's tests may have left a Ray in this process."""
    asked: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(machine_monitor, "living_nodes", lambda: asked.append("nodes") or [])
    assert ClusterNodes()() == {}
    assert asked == []


class Node:
    """A living node."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id


class Cluster:
    """Stands for Ray: nodes whose readers answer when the test says so; a call is (node, number)."""

    def __init__(self, *node_ids: str) -> None:
        self.living = list(node_ids)
        self.calls: list[tuple[str, int]] = []
        self.slow: set[str] = set()

    def living_nodes(self) -> list[Node]:
        return [Node(node_id) for node_id in self.living]

    def start_reader(self, node_id: str) -> Any:
        def ask() -> tuple[str, int]:
            self.calls.append((node_id, len(self.calls)))
            return self.calls[-1]

        return SimpleNamespace(read=SimpleNamespace(remote=ask))

    def wait(self, calls: list[tuple[str, int]], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(calls) and timeout > 0
        return [call for call in calls if call[0] not in self.slow], [call for call in calls if call[0] in self.slow]

    def get(self, call: tuple[str, int]) -> dict[str, float]:
        return {"call": float(call[1])}

    def is_initialized(self) -> bool:
        return True


@pytest.mark.fast
def test_a_slow_node_has_one_open_call_whose_answer_counts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("a", "b")
    monkeypatch.setattr(machine_monitor, "ray", cluster)
    monkeypatch.setattr(machine_monitor, "living_nodes", cluster.living_nodes)
    monkeypatch.setattr(machine_monitor, "_start_reader", cluster.start_reader)
    readings = ClusterNodes()
    cluster.slow = {"b"}
    assert readings() == {0: {"call": 0.0}}
    assert readings() == {0: {"call": 2.0}}
    cluster.slow = set()
    assert readings() == {0: {"call": 3.0}, 1: {"call": 1.0}}
    cluster.slow = {"b"}
    readings()
    cluster.living = ["a"]
    cluster.slow = set()
    assert readings().keys() == {0}, "the open call of a dead node is dropped"
    cluster.living = ["a", "b", "c"]
    assert readings().keys() == {0, 1, 2}
    assert [node for node, _ in cluster.calls].count("b") == 3


@pytest.mark.fast
def test_a_run_of_one_machine_writes_its_load_to_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    intervals = {"collection_interval": 0.05, "flush_interval": 0.05}
    config = LoggerConfig.build(log_dir=str(tmp_path), gpu_monitoring=intervals)
    logged, file = Logger(config), tmp_path / "metrics.jsonl"
    with monitored(config, logged):
        logged.log_metrics({"loss": 1.0}, 4, prefix="train")
        until(lambda: file.read_text().count('"ray"') >= 2)
    logged.close()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    load = [row["metrics"] for row in rows if row["prefix"] == "ray"]
    assert load[-1]["train_step"] == 4.0
    assert {"node.0.cpu_util", "node.0.mem_gb", "node.0.mem_total_gb", "node.0.processes.mem_gb"} <= load[-1].keys()


@pytest.mark.fast
def test_nothing_is_read_unless_asked_for(tmp_path: Path) -> None:
    config, before = LoggerConfig.build(log_dir=str(tmp_path), monitor_gpus=False), threading.active_count()
    with monitored(config, Taken()):
        assert threading.active_count() == before


@pytest.mark.ray
def test_every_node_of_a_joined_cluster_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()  # an earlier module's
    with ray_nodes(1, 1) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        init_ray()
        try:
            readings, found = ClusterNodes(), {}
            end = time.monotonic() + 60
            while len(found) < 2 and time.monotonic() < end:
                found |= readings()  # an actor's first answer takes as long as its process
            assert found.keys() == {0, 1}
            assert all(load["mem_gb"] > 0 and load["processes.mem_gb"] > 0 for load in found.values())
        finally:
            ray.shutdown()
