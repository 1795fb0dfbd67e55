"""Features in combinations that no other run has: weights of data sets with other algorithms."""

from pathlib import Path

import pytest
from example_runs import REPOSITORY, StartExample, finished

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

SUMS = """
  train:
    - {name: easy, dataset_name: %(dataset)s, num_samples: 300, min_operand: 10, max_operand: 29, seed: 1, weight: 3}
    - {name: hard, dataset_name: %(dataset)s, num_samples: 300, max_operand: 99, seed: 2, weight: 1}
"""
STEPS = range(1, 5)


def weighted(folder: Path, example: str, dataset: str) -> str:
    """Write a configuration of an example with two data sets, and return its path."""
    path = folder / "config.yaml"
    path.write_text(f"defaults: {REPOSITORY}/examples/configs/{example}\ndata:{SUMS % {'dataset': dataset}}")
    return str(path)


def test_weights_hold_for_all_prompts_that_dynamic_sampling_draws(start_example: StartExample, tmp_path: Path) -> None:
    overrides = (
        *(f"grpo.max_num_steps={len(STEPS)}", "grpo.val_at_start=false", "grpo.val_period=0"),
        *("grpo.num_prompts_per_step=8", "policy.train_global_batch_size=64", "grpo.num_generations_per_prompt=8"),
        *("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2", "checkpointing.enabled=false"),
    )
    config = weighted(tmp_path, "grpo_math_cpu.yaml", "arithmetic")
    metrics = finished(start_example, "run_grpo.py", config, overrides, tmp_path)
    for step in STEPS:
        assert metrics["train", step, "share/easy"] + metrics["train", step, "share/hard"] == pytest.approx(1)
        assert 0 < metrics["train", step, "reward"] < 1, "every group has right and wrong answers"
    mean = sum(metrics["train", step, "share/easy"] for step in STEPS) / len(STEPS)
    assert mean == pytest.approx(0.75, abs=1 / 16), "one prompt of the 16 of a round"


def test_weights_hold_in_every_step_of_a_distillation(start_example: StartExample, tmp_path: Path) -> None:
    overrides = (
        *(f"distillation.max_num_steps={len(STEPS)}", "distillation.val_at_start=false", "distillation.val_period=0"),
        *("distillation.num_prompts_per_step=16", "policy.train_global_batch_size=16", "checkpointing.enabled=false"),
    )
    config = weighted(tmp_path, "distillation_math_cpu.yaml", "arithmetic")
    metrics = finished(start_example, "run_distillation.py", config, overrides, tmp_path)
    assert [metrics["train", step, "share/easy"] for step in STEPS] == [0.75] * len(STEPS)


def test_weights_hold_in_every_step_of_dpo(start_example: StartExample, tmp_path: Path) -> None:
    overrides = (f"dpo.max_num_steps={len(STEPS)}", "dpo.val_period=0", "dpo.val_at_end=false")
    config = weighted(tmp_path, "dpo_cpu.yaml", "arithmetic_preference")
    metrics = finished(start_example, "run_dpo.py", config, (*overrides, "checkpointing.enabled=false"), tmp_path)
    assert [metrics["train", step, "share/easy"] for step in STEPS] == [0.75] * len(STEPS)
