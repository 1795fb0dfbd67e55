"""GRPO that samples ahead of training: it learns, repeats itself, and loses no prompt when it is killed."""

import json
from collections import Counter
from pathlib import Path

import pytest
from example_runs import ExampleRun, StartExample, killed_and_resumed, of_training, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
SMALL = ("grpo.num_prompts_per_step=4", "policy.train_global_batch_size=32")
"""Half of the configuration's batch; steps stay a few groups, which become ready at different times."""
IN_FLIGHT = ("grpo.overlap.mode=ahead", "grpo.overlap.order=ready_first", "grpo.overlap.in_flight_weight_updates=true")


def trained_rows(run: ExampleRun, steps: range) -> Counter[int]:
    """How often each row of the data was trained on, in groups, by the trajectory logs of some steps."""
    rows: Counter[int] = Counter()
    for step in steps:
        (path,) = run.log_dir.glob(f"exp_*/train_data_step{step}.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        rows.update(sample["idx"] for sample in samples if sample["sample"] == 0)
    return rows


def test_a_fixed_schedule_is_repeated_bit_for_bit_also_by_a_killed_run(
    start_example: StartExample, tmp_path: Path
) -> None:
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=3", *SMALL)
    overrides += ("grpo.max_val_samples=32", "grpo.val_batch_size=32")
    overrides += ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2")
    killed = killed_and_resumed(start_example, "run_grpo.py", CONFIG, overrides, tmp_path, steps=8)
    again = start_example("run_grpo.py", CONFIG, *overrides, "checkpointing.enabled=false", logs="again")
    assert again.finish() == 0, again.log()[-3000:]
    metrics = read_metrics(again.log_dir)
    assert of_training(metrics) == killed
    for step in range(1, 9):
        waited, exposed = (metrics["timing/train", step, name] for name in ("generation", "exposed_generation"))
        assert 0 <= exposed <= waited
        starved, bubble = (
            metrics["timing/train", step, f"idle/{name}"] for name in ("buffer_starvation", "refit_bubble")
        )
        assert 0 <= starved <= exposed and 0 <= bubble <= metrics["timing/train", step, "weight_sync"]
    ages = [killed["train", step, "max_trajectory_age"] for step in range(1, 9)]
    assert ages == [0.0, 1.0, *[2.0] * 6]
    assert killed["train", 8, "buffer_size"] == 0


def test_no_prompt_is_lost_or_trained_twice_when_answers_continue_through_updates_and_the_run_is_killed(
    start_example: StartExample, tmp_path: Path
) -> None:
    overrides = (
        *IN_FLIGHT,
        *SMALL,
        "grpo.overlap.max_age_steps=3",
        "data.train.num_samples=32",
        "grpo.max_num_epochs=1",
        "grpo.val_at_start=false",
        "checkpointing.save_period=2",
        f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
    )
    killed = start_example("run_grpo.py", CONFIG, *overrides)
    killed.wait_for("step 5/")
    killed.process.kill()
    killed.finish()
    resumed = start_example("run_grpo.py", CONFIG, *overrides, logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    first = min(step for _, step, _ in of_training(read_metrics(resumed.log_dir)))
    assert first in (3, 5, 7)
    rows = trained_rows(killed, range(1, first)) + trained_rows(resumed, range(first, 9))
    assert rows == Counter(range(32))
    ages = [value for (_, _, name), value in read_metrics(resumed.log_dir).items() if name == "max_trajectory_age"]
    assert 0 < max(ages) <= 3


@pytest.mark.long
def test_a_policy_learns_from_answers_of_older_weights(start_example: StartExample) -> None:
    run = start_example(
        "run_grpo.py",
        CONFIG,
        *IN_FLIGHT,
        "grpo.overlap.max_age_steps=2",
        "loss_fn.use_importance_sampling_correction=true",
        "grpo.max_num_steps=40",
        "grpo.val_period=40",
        "checkpointing.enabled=false",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert metrics["validation", 40, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.25
    assert all(0 <= metrics["idle", step, name] <= 1 for step in range(1, 41) for name in ("trainer", "engines"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "config", "overrides"),
    [
        ("run_grpo.py", CONFIG, (*IN_FLIGHT, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2")),
        ("run_grpo.py", CONFIG, (*IN_FLIGHT, "policy.dtensor_cfg.lora_cfg.enabled=true")),
        ("run_distillation.py", "distillation_math_cpu.yaml", ("distillation.overlap.mode=ahead",)),
    ],
    ids=["dynamic sampling", "LoRA", "distillation"],
)
def test_other_features_work_with_answers_that_were_sampled_ahead(
    start_example: StartExample, script: str, config: str, overrides: tuple[str, ...]
) -> None:
    section = "distillation" if "distillation" in script else "grpo"
    short = (f"{section}.max_num_steps=4", f"{section}.val_at_start=false", "checkpointing.enabled=false")
    run = start_example(script, config, *overrides, *short)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    assert metrics["train", 4, "max_trajectory_age"] == 1.0
