"""Equal runs that start at the same time in one folder have separate ports, log folders and Ray sessions."""

import json
from pathlib import Path

import pytest
from example_runs import ExampleRun, StartExample

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]

Losses = list[tuple[int, float]]


def losses_of(folder: Path) -> Losses:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["metrics"]["loss"]) for row in rows if row["prefix"] == "train"]


def finish_all(runs: list[ExampleRun], steps: int) -> None:
    """Check that all runs succeed, each in its own log folder, with bitwise equal losses."""
    statuses = [run.finish(timeout_s=900) for run in runs]
    assert statuses == [0] * len(runs), "\n".join(run.log()[-1500:] for run in runs)
    folders = sorted(runs[0].log_dir.glob("exp_*"))
    losses = [losses_of(folder) for folder in folders]
    assert len(folders) == len(runs)
    assert len(losses[0]) == steps
    assert losses == [losses[0]] * len(runs)


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_six_supervised_runs_finish_side_by_side(start_example: StartExample, tmp_path: Path, attempt: int) -> None:
    runs = [
        start_example(
            "run_sft.py", "sft_cpu.yaml", "sft.max_num_steps=3", f"checkpointing.checkpoint_dir={tmp_path}/{i}"
        )
        for i in range(6)
    ]
    finish_all(runs, steps=3)
    assert all((tmp_path / f"{i}/step_3").is_dir() for i in range(6))


@pytest.mark.vllm
def test_three_grpo_runs_with_collective_weight_sync_finish_side_by_side(
    start_example: StartExample, tmp_path: Path
) -> None:
    overrides = (
        "grpo.max_num_steps=2",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "policy.generation.weight_sync.transport=collective",
    )
    runs = [
        start_example("run_grpo.py", "grpo_math_cpu.yaml", *overrides, f"checkpointing.checkpoint_dir={tmp_path}/{i}")
        for i in range(3)
    ]
    finish_all(runs, steps=2)
