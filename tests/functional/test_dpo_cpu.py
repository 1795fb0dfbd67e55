"""DPO end to end on the CPU: it starts at ln 2, margins rise, and a killed run resumes bit for bit."""

import math

import pytest
from example_runs import StartExample, read_metrics
from supervised_runs import run_and_resume, run_once

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def test_dpo_starts_at_ln_2_and_widens_the_margin(start_example: StartExample, tmp_path) -> None:
    metrics = run_once(start_example, "dpo", 20, tmp_path)
    assert metrics["validation", 0, "preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["train", 1, "loss"] == pytest.approx(math.log(2), abs=1e-5)
    margins = [metrics["validation", step, "rewards_margin_mean"] for step in (0, 10, 20)]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[2] > margins[1] > 0
    assert metrics["validation", 20, "accuracy"] > 0.6


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    run_and_resume(start_example, "dpo", 20, tmp_path)


NAMED_SETS = (
    "data.validation=[{dataset_name: arithmetic_preference, num_samples: 64}, "
    "{dataset_name: arithmetic_preference, num_samples: 64, max_operand: 19, name: easy}]"
)


def test_kto_starts_at_one_half_and_learns(start_example: StartExample) -> None:
    """A second validation set has its own name and metric prefix."""
    changes = ("dpo.preference_loss=kto", "dpo.max_num_steps=40", "dpo.val_period=20", "checkpointing.enabled=false")
    rate = "policy.optimizer.kwargs.lr=1.0e-4"
    run = start_example("run_dpo.py", "dpo_cpu.yaml", *changes, rate, NAMED_SETS, logs="kto")
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert metrics["train", 1, "loss"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["train", 1, "kl_baseline"] == pytest.approx(0, abs=1e-4)
    for prefix in ("validation", "validation-easy"):
        assert metrics[prefix, 0, "loss"] == pytest.approx(0.5, abs=1e-6)
        assert metrics[prefix, 0, "rewards_margin_mean"] == pytest.approx(0, abs=1e-5)
        losses = [metrics[prefix, step, "loss"] for step in (20, 40)]
        margins = [metrics[prefix, step, "rewards_margin_mean"] for step in (20, 40)]
        assert losses[1] < losses[0]
        assert margins[1] > margins[0]
        assert losses[1] < 0.5
        assert margins[1] > 0
        assert metrics[prefix, 40, "num_valid_samples"] == 128
