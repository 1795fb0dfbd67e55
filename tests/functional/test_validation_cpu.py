"""Validations give the same answers while training goes on, in a killed run, and with other batches and engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_runs import ExampleRun, Metrics, StartExample, killed_and_resumed, of_training, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
SHORT = (
    "grpo.max_num_steps=8",
    "grpo.val_period=2",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=8",
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "grpo.overlap.mode=ahead",
    "grpo.overlap.max_age_steps=2",
)


def without_versions(metrics: Metrics) -> Metrics:
    return {key: value for key, value in metrics.items() if not key[2].endswith("_weight_version")}


def finished(run: ExampleRun) -> Metrics:
    assert run.finish() == 0, run.log()[-3000:]
    return read_metrics(run.log_dir)


@pytest.mark.long
def test_a_validation_of_one_version_has_the_numbers_of_one_that_stops_training_also_in_a_killed_run(
    start_example: StartExample, tmp_path: Path
) -> None:
    overrides = (*SHORT, "grpo.overlap.validation=hold_updates", "checkpointing.save_period=4")
    meanwhile = killed_and_resumed(start_example, "run_grpo.py", CONFIG, overrides, tmp_path, steps=8)
    stopping = finished(start_example("run_grpo.py", CONFIG, *SHORT, "checkpointing.enabled=false", logs="stop"))
    assert without_versions(meanwhile) == of_training(stopping)
    for step in range(0, 10, 2):
        assert meanwhile["validation", step, "min_weight_version"] == step
        assert meanwhile["validation", step, "max_weight_version"] == step


def validated(run: ExampleRun) -> list[dict[str, Any]]:
    """Return the rows of the validation before training."""
    assert run.finish() == 0, run.log()[-3000:]
    (stored,) = run.log_dir.rglob("val_data_step0.jsonl")
    lines = stored.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_validations_do_not_depend_on_batches_and_engines(start_example: StartExample, backend: str) -> None:
    overrides = (
        *("policy.zero_mismatch=true", f"policy.generation.backend={backend}", "policy.precision=bfloat16"),
        *("grpo.max_num_steps=1", "grpo.val_at_start=true", "grpo.val_period=0", "grpo.max_val_samples=24"),
        "checkpointing.enabled=false",
    )
    ways = {
        "together": ("grpo.val_batch_size=24",),
        "in batches": ("grpo.val_batch_size=5",),
        "two engines": ("grpo.val_batch_size=24", "cluster.ranks_per_node=2"),
    }
    rows = {
        name: validated(start_example("run_grpo.py", CONFIG, *overrides, *more, logs=f"{backend} {name}"))
        for name, more in ways.items()
    }
    assert len(rows["together"]) == 24
    assert len({row["content"][-1]["content"] for row in rows["together"]}) > 12
    assert rows["in batches"] == rows["together"]
    assert rows["two engines"] == rows["together"]
