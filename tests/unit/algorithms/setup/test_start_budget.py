"""The table of a start: phases that add up, the slowest worker of each group, and the metrics."""

import logging
import re
import time

import pytest

from nemo_rl.algorithms.setup import start_budget
from nemo_rl.algorithms.setup.start_budget import StartBudget
from nemo_rl.distributed.workers.start_phases import slowest_of


class Metrics:
    """A logger of metrics that keeps them."""

    def log_metrics(self, metrics, step, prefix=""):
        self.logged = {f"{prefix}/{name}": value for name, value in metrics.items()}, step


def test_phases_and_the_slowest_workers_are_in_the_log_and_in_the_metrics(caplog):
    budget, metrics = StartBudget(time.perf_counter() - 4.0), Metrics()
    with budget.phase("Ray"):
        time.sleep(0.05)
    workers = [("lm_policy-0-0", "10.0.0.1"), ("lm_policy-1-0", "10.0.0.2"), ("lm_policy-2-0", "10.0.0.3")]
    budget.add_workers(
        "policy", slowest_of(workers, [{"imports": 8.0}, {"imports": 30.0, "weights": 2.0}, {"imports": 9.0}])
    )
    with caplog.at_level(logging.INFO):
        budget.log(metrics)
    logged, step = metrics.logged
    assert step == 0
    assert logged["timing/start/before_setup"] == pytest.approx(4.0, abs=0.1)
    assert logged["timing/start/policy/imports"] == 30.0
    assert logged["timing/start/policy/weights"] == 2.0
    parts = sum(logged[f"timing/start/{name}"] for name in ("before_setup", "Ray", "the_rest"))
    assert parts == pytest.approx(logged["timing/start/total"])
    (record,) = caplog.records
    assert re.fullmatch(r"The start took \d\.\d s: before setup \d\.\d s\.", record.getMessage())
    (slow,) = [line for line in record.details.splitlines() if "policy: imports" in line]
    assert "30.0 s" in slow and "lm_policy-1-0 on 10.0.0.2, median 9.0" in slow


def test_a_phase_that_takes_long_says_so(caplog, monkeypatch):
    monkeypatch.setattr(start_budget, "_FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(start_budget, "_LATER_WAITS_S", 100.0)
    budget = StartBudget(0.0)
    with caplog.at_level(logging.INFO):
        with budget.phase("quick"):
            pass
        with budget.phase("engines and models"):
            time.sleep(0.3)
    assert [record.getMessage() for record in caplog.records] == ["Starting: engines and models, 0 s so far."]


def test_a_program_that_does_not_measure_its_start_has_no_time_before_setup():
    budget, metrics = StartBudget(0.0), Metrics()
    budget.log(metrics)
    logged, _ = metrics.logged
    assert logged.keys() == {"timing/start/the_rest", "timing/start/total"}
    assert logged["timing/start/total"] < 1.0
