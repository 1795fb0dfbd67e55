"""Kill processes of a run at random moments: over an epoch each prompt is trained on exactly once.

pytest tests/faults/test_random_kills.py -m long
"""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from example_runs import ExampleRun, ExampleRuns

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

NUM_KILLS = 50
NUM_PROMPTS = 1600
SEED = 27
LONGEST_WAIT_S = 1.5
"""A process is killed up to so many seconds after the first checkpoint since the last kill."""
VICTIMS = {
    "driver": (),
    "policy rank": ("ray::PolicyRank", "ray::lm_policy"),
    "engine": ("ray::GenerationWorker", "ray::vllm_engine"),
    "environment": ("ray::EnvironmentActor",),
}
OVERRIDES = (
    "grpo.max_num_epochs=1",
    "grpo.max_num_steps=100000",
    f"data.train.num_samples={NUM_PROMPTS}",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "checkpointing.save_period=2",
    "cluster.max_run_restarts=1000",
    "cluster.max_actor_restarts=1000",
    "logger.tensorboard_enabled=false",
)
AHEAD = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=ready_first",
    "grpo.overlap.in_flight_weight_updates=true",
    "grpo.overlap.max_age_steps=2",
    "+policy.generation.vllm_kwargs.max_num_seqs=4",  # so that answers are unfinished in checkpoints
)
MODES = {
    "none": (),
    "ahead continue": AHEAD,
    "ahead restart": (*AHEAD, "grpo.overlap.partial_responses=restart"),
}


def newest_checkpoint(checkpoints: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(folder.name.removeprefix("step_")) for folder in checkpoints.glob("step_*")), default=0)


def wait_for_checkpoint(run: ExampleRun, checkpoints: Path, after: int) -> bool:
    """Wait until a run has saved a later step; return False if it ended first."""
    end = time.monotonic() + 240
    while newest_checkpoint(checkpoints) <= after:
        if run.process.poll() is not None:
            return False
        assert time.monotonic() < end, f"No checkpoint after step {after} in 240 s:\n{run.log()[-3000:]}"
        time.sleep(0.02)
    return True


def kill_at_random(run: ExampleRun, checkpoints: Path, draws: random.Random, most: int) -> list[str]:
    """Kill processes of a run until it ends, or `most` times; return what was killed."""
    killed: list[str] = []
    while len(killed) < most and wait_for_checkpoint(run, checkpoints, newest_checkpoint(checkpoints)):
        time.sleep(draws.uniform(0, LONGEST_WAIT_S))
        victim = draws.choice(list(VICTIMS))
        run.processes()
        if run.process.poll() is not None:
            break
        if victim == "driver":
            run.process.kill()
        else:
            run.kill(*VICTIMS[victim], within_s=60)
        killed.append(victim)
        if victim == "driver":
            break
    return killed


def trained_prompts(log_dir: Path) -> tuple[Counter[int], list[int]]:
    """How often each prompt was trained on, in groups, and the steps, by the newest file of each step."""
    newest: dict[int, Path] = {}
    for path in sorted(log_dir.glob("exp_*/train_data_step*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        newest[int(path.stem.removeprefix("train_data_step"))] = path
    prompts: Counter[int] = Counter()
    for path in newest.values():
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        prompts.update(sample["idx"] for sample in samples if sample["sample"] == 0)
    return prompts, sorted(newest)


@pytest.mark.parametrize("mode", MODES)
def test_each_prompt_is_trained_on_once_whatever_is_killed(mode: str, tmp_path: Path) -> None:
    runs, draws, killed = ExampleRuns(tmp_path), random.Random(SEED), Counter[str]()
    checkpoints = tmp_path / "checkpoints"
    overrides = (*OVERRIDES, *MODES[mode], f"checkpointing.checkpoint_dir={checkpoints}")
    try:
        status = -1
        while status != 0:
            run = runs.start("run_grpo.py", "grpo_math_cpu.yaml", *overrides)
            victims = kill_at_random(run, checkpoints, draws, NUM_KILLS - killed.total())
            killed.update(victims)
            status = run.finish(900)
            assert status == 0 or "driver" in victims or "RunRestartError" in run.log(), run.log()[-4000:]
            assert run.survivors() == []
    finally:
        runs.close()
    prompts, steps = trained_prompts(tmp_path / "logs")
    assert killed.total() == NUM_KILLS, f"the epoch was over after {killed}"
    assert steps == list(range(1, NUM_PROMPTS // 4 + 1))
    assert prompts == Counter(range(NUM_PROMPTS))
