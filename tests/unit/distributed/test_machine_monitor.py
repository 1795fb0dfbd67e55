"""The monitor logs readings of nodes from a thread, and no failure of it reaches the run."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_nodes import ray_nodes

from nemo_rl.config import LoggerConfig
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
