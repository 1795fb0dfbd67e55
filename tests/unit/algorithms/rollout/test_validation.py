"""Validation of a run that samples: which rows, and how they weigh."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.rollout.start import RolloutRecipe, validation_of
from nemo_rl.config import load_config
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.experience.trajectory import Outcome, Rollouts, Trajectory

pytestmark = pytest.mark.fast

CONFIG = Path(__file__).parents[4] / "examples/configs/grpo_math_cpu.yaml"


class Runner:
    """Answers every prompt; the reward of row i is i."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def collect(self, prompts: Any, num_generations: int, sampling: Any, key: Any) -> Rollouts:
        self.rows.append(prompts["idx"])
        found = [
            Trajectory(group, sample, 0, "math", [], 2, reward=float(idx), outcome=Outcome.FINISHED)
            for group, idx in enumerate(prompts["idx"])
            for sample in range(num_generations)
        ]
        return Rollouts(found, {"math/rows": float(len(found))})


@pytest.mark.parametrize(
    ("asked", "batch_size", "batches"),
    [(10, 4, [4, 4, 2]), (10, 16, [10]), (10, "null", [10]), ("null", 8, [8, 8, 7]), (99, 23, [23])],
)
def test_all_rows_that_are_asked_for_are_validated_once(asked: Any, batch_size: Any, batches: list[int]) -> None:
    overrides = [f"grpo.max_val_samples={asked}", f"grpo.val_batch_size={batch_size}", "data.train.num_samples=64"]
    config = load_config(CONFIG, [*overrides, "data.validation.num_samples=23"])
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, list(config.env))
    recipe = RolloutRecipe(tokenizer, data, loss_fn=None, roles={}, stages=lambda roles: [])  # type: ignore[arg-type]
    runner = Runner()
    quiet = SimpleNamespace(ensure_fresh=lambda: None, write_validation=lambda step, trajectories: None)
    validation = validation_of(config, recipe, runner, quiet, quiet)  # type: ignore[arg-type]
    assert validation is not None
    validation.start(1)
    result = validation.finished(wait=False)
    assert result is not None
    metrics = result.metrics
    assert [len(rows) for rows in runner.rows] == batches
    assert sum(runner.rows, []) == list(range(sum(batches)))
    assert metrics["num_samples"] == sum(batches)
    assert metrics["accuracy"] == pytest.approx((sum(batches) - 1) / 2)
    assert metrics["math/rows"] == pytest.approx(sum(n * n for n in batches) / sum(batches))
