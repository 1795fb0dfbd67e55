"""GRPO whose engines leave and join while it runs."""

import time
from pathlib import Path

import pytest
from example_runs import StartExample, of_training, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

TWO_ENGINES = (
    "cluster.ranks_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.ranks_per_node=2",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "checkpointing.enabled=false",
)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "ahead"])
def test_a_run_keeps_its_numbers_while_engines_leave_and_join(
    start_example: StartExample, tmp_path: Path, mode: str
) -> None:
    overrides = (*TWO_ENGINES, f"grpo.overlap.mode={mode}", "grpo.max_num_steps=60")
    alone = start_example("run_grpo.py", "grpo_math_cpu.yaml", *overrides, logs="alone")
    assert alone.finish() == 0, alone.log()[-3000:]
    file = tmp_path / "engines"
    changed = (*overrides, f"policy.generation.num_engines_file={file}")
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *changed, logs="changed")
    run.wait_for("step 4/")
    file.write_text("1")
    run.wait_for("engine 1 has left; engines: 1 of 2")
    before = len(run.processes("ray::vllm_engine", "ray::GenerationWorker"))
    file.write_text("2")
    run.wait_for("engine 1 joins; engines: 2 of 2")
    time.sleep(1.0)
    assert (before, len(run.processes("ray::vllm_engine", "ray::GenerationWorker"))) == (1, 2)
    assert run.finish() == 0, run.log()[-3000:]
    assert of_training(read_metrics(run.log_dir)) == of_training(read_metrics(alone.log_dir))
