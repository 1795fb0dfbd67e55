"""DPO end to end on the CPU: starts at ln 2, margins rise, a killed run goes on bit for bit."""

import math

import pytest
from example_runs import StartExample
from supervised_runs import run_and_resume

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def test_learns_and_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    metrics = run_and_resume(start_example, "dpo", 20, tmp_path)
    assert metrics["validation", 0, "preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["train", 1, "loss"] == pytest.approx(math.log(2), abs=1e-5)
    margins = [metrics["validation", step, "rewards_margin_mean"] for step in (0, 10, 20)]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[2] > margins[1] > 0
    assert metrics["validation", 20, "accuracy"] > 0.6
