"""A source that samples one step ahead of training, as the documentation shows it: ratio, resume, a dead engine."""

import re
from functools import partial
from pathlib import Path

import pytest
from example_runs import REPOSITORY, StartExample, killed_and_resumed, of_training, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
MAIN = f"""
import sys

from nemo_rl.launch.command_line import launch
from nemo_rl.config import GRPOMasterConfig


def train(config):
    from nemo_rl.algorithms.grpo import grpo_train, setup

    with setup(config) as run:
        run.source.rollouts = OneStepAhead(run.source.rollouts)
        grpo_train(run)


if __name__ == "__main__":
    sys.exit(launch("", "{REPOSITORY}/examples/configs/{CONFIG}", GRPOMasterConfig, train))
"""


@pytest.fixture
def start_ahead(start_example: StartExample, tmp_path: Path) -> StartExample:
    """Start a GRPO run with the source of the documentation."""
    page = (REPOSITORY / "docs/development/adding-things.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (source,) = [block for block in shown if "class OneStepAhead" in block]
    (tmp_path / "run_ahead.py").write_text(source + MAIN)
    return partial(start_example, environment={"PYTHONPATH": str(REPOSITORY)})


@pytest.mark.long
def test_the_ratio_follows_the_older_policy_and_a_killed_run_repeats_its_metrics_bit_for_bit(
    start_ahead: StartExample, tmp_path: Path
) -> None:
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=3")
    metrics = killed_and_resumed(start_ahead, str(tmp_path / "run_ahead.py"), CONFIG, overrides, tmp_path, steps=8)
    ages = [metrics["train", step, "avg_trajectory_age"] for step in range(1, 9)]
    assert ages == [0.0] + [1.0] * 7
    ratios = [metrics["train", step, "probs_ratio_max"] for step in range(1, 9)]
    assert ratios[0] == 1.0
    assert min(ratios[1:]) > 1.0001
    assert metrics["train", 1, "token_mult_prob_error"] < 1.01


@pytest.mark.long
def test_importance_weights_account_for_stale_tokens_and_a_new_engine_is_no_reason_to_stop(
    start_ahead: StartExample, tmp_path: Path
) -> None:
    run = start_ahead(
        str(tmp_path / "run_ahead.py"),
        CONFIG,
        "grpo.max_num_steps=5",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "loss_fn.use_importance_sampling_correction=true",
    )
    run.wait_for("step 2/5", timeout_s=300)
    run.kill("ray::vllm_engine", "ray::GenerationWorker")
    assert run.finish() == 0, run.log()[-3000:]
    assert "restarting it" in run.log()
    metrics = of_training(read_metrics(run.log_dir))
    assert all(metrics["train", step, "probs_ratio_max"] == 1.0 for step in range(1, 6))
    weights = [metrics["train", step, "sampling_importance_ratio"] for step in (2, 5)]
    assert all(abs(weight - 1) > 1e-6 for weight in weights)
