"""Open requests of engines: counted while a step samples, per engine, and only if asked for."""

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.runtime.throughput import engine_load

pytestmark = pytest.mark.fast


class Engines:
    """Two engines, of which the first has ever more requests."""

    def __init__(self) -> None:
        self.asked = 0

    def open_requests(self) -> list[int]:
        self.asked += 1
        return [self.asked, 4]

    def load_metrics(self) -> dict[str, float]:
        return {"num_preemptions": 1.0}


def policy(**keys: Any) -> Any:
    return SimpleNamespace(sampling=SimpleNamespace(vllm_cfg=SimpleNamespace(**keys)))


def test_open_requests_of_a_step_are_reported_for_each_engine() -> None:
    engines = Engines()
    with ExitStack() as threads:
        keys = {"enable_vllm_metrics_logger": True, "vllm_metrics_logger_interval": 0.01}
        load: Any = engine_load(policy(**keys), engines, threads)  # type: ignore[arg-type]
        while engines.asked < 5:
            time.sleep(0.01)
        found = load()
        highest = found["engine.0.open_requests_max"]
        assert found["num_preemptions"] == 1.0 and found["engine.1.open_requests_mean"] == 4.0
        assert highest >= 4 and found["engine.0.open_requests_mean"] == (highest + 1) / 2
        while engines.asked < highest + 3:
            time.sleep(0.01)
        assert load()["engine.0.open_requests_mean"] > highest, "the counts of the step before are gone"
    time.sleep(0.05)
    asked = engines.asked
    time.sleep(0.05)
    assert engines.asked == asked, "the thread has ended"


def test_nothing_is_counted_unless_asked_for() -> None:
    engines = Engines()
    load = engine_load(policy(enable_vllm_metrics_logger=False), engines, ExitStack())  # type: ignore[arg-type]
    assert load() == {"num_preemptions": 1.0} and engines.asked == 0
