"""Validation of a run that samples: which rows, and how they weigh."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.rollout.validation import make_validation
from nemo_rl.config import load_config
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.experience.trajectory import Outcome, Rollouts, Trajectory
from nemo_rl.models.generation.factory import sampling_params

pytestmark = pytest.mark.fast

CONFIG = Path(__file__).parents[4] / "examples/configs/grpo_math_cpu.yaml"


class Runner:
    """Answers every prompt; the reward of row i is i."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def collect(self, prompts: Any, num_generations: int, sampling: Any, key: Any) -> Rollouts:
        self.rows.append(prompts["idx"])
        found = [
            Trajectory(group, sample, idx, task, [], 2, reward=float(idx), outcome=Outcome.FINISHED)
            for group, (idx, task) in enumerate(zip(prompts["idx"], prompts["task_name"], strict=True))
            for sample in range(num_generations)
        ]
        return Rollouts(found, {"math/rows": float(len(found))})


def validated(runner: Runner, *overrides: str) -> dict[str, float]:
    """Return the metrics of a validation with the rows of a configuration."""
    config = load_config(CONFIG, overrides)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, list(config.env))
    sampling = sampling_params(config.policy, tokenizer.eos_token_id, validation=True)
    quiet = SimpleNamespace(ensure_fresh=lambda: None, write=lambda step, trajectories: None)
    validation = make_validation(data, config.algorithm, sampling, runner, quiet, quiet)  # type: ignore[arg-type]
    assert validation is not None
    validation.start(1)
    result = validation.finished(wait=False)
    assert result is not None
    return dict(result.metrics)


@pytest.mark.parametrize(
    ("asked", "batch_size", "batches"),
    [(10, 4, [4, 4, 2]), (10, 16, [10]), (10, "null", [10]), ("null", 8, [8, 8, 7]), (99, 23, [23])],
)
def test_all_rows_that_are_asked_for_are_validated_once(asked: Any, batch_size: Any, batches: list[int]) -> None:
    overrides = [f"grpo.max_val_samples={asked}", f"grpo.val_batch_size={batch_size}", "data.train.num_samples=64"]
    runner = Runner()
    metrics = validated(runner, *overrides, "data.validation.num_samples=23")
    assert [len(rows) for rows in runner.rows] == batches
    assert sum(runner.rows, []) == list(range(sum(batches)))
    assert metrics["num_samples"] == sum(batches)
    assert metrics["accuracy"] == pytest.approx((sum(batches) - 1) / 2)
    assert metrics["math/rows"] == pytest.approx(sum(n * n for n in batches) / sum(batches))


def test_each_data_set_and_each_environment_is_validated_and_has_its_own_metrics() -> None:
    """Rows without a name come first: 0 to 39. The long set has 40 to 59, the short one 60 to 62. Rewards are rows."""
    sets = (
        "data.validation=[{name: long, dataset_name: arithmetic, num_samples: 20},"
        " {name: short, dataset_name: arithmetic, num_samples: 3, env_name: own.Game, seed: 5},"
        " {dataset_name: arithmetic, num_samples: 40, env_name: own.Game, seed: 6}]"
    )
    runner = Runner()
    metrics = validated(runner, "data.train.num_samples=64", sets, "+env={own.Game: {}}", "grpo.max_val_samples=17")
    assert sum(runner.rows, []) == [*range(7), *range(40, 47), *range(60, 63)]
    counts = {group: metrics[f"{group}/num_samples"] for group in ("long", "short", "math", "own.Game")}
    assert counts == {"long": 7, "short": 3, "math": 7, "own.Game": 10}
    assert metrics["long/accuracy"] == metrics["math/accuracy"] == pytest.approx(43)
    assert metrics["short/accuracy"] == pytest.approx(61)
    assert metrics["own.Game/accuracy"] == pytest.approx((sum(range(7)) + 60 + 61 + 62) / 10)
    assert metrics["num_samples"] == 17
