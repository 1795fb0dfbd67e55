"""A run that is killed while episodes of many turns are being played trains on the same episodes when it is resumed."""

import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml
from example_runs import REPOSITORY, ExampleRun, Metrics, StartExample, of_training, read_metrics
from trained_samples import resumed_tokens, sequences, trained

from nemo_rl.kits.games.text_game import ACTION_END

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_STEPS = 5
NUM_PROMPTS = 20
EPISODES_PER_STEP = 16
SHORT = (
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.num_prompts_per_step=4",
    f"data.train.num_samples={NUM_PROMPTS}",
    "grpo.num_generations_per_prompt=4",
    f"policy.train_global_batch_size={EPISODES_PER_STEP}",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "checkpointing.save_period=2",
    "logger.tensorboard_enabled=false",
)
FIXED_SCHEDULE = ("grpo.overlap.mode=ahead",)
IN_FLIGHT = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=ready_first",
    "grpo.overlap.in_flight_weight_updates=true",
    "grpo.overlap.max_age_steps=2",
)
SAME_WEIGHTS = ("policy.optimizer.kwargs.lr=0.0",)
"""So that every mode has to play the same episodes, whatever finishes when."""
LIKELIEST = ("policy.generation.top_p=1.0e-6",)
"""Each token is the likeliest one, also after an interruption within a turn."""


def journaled(folder: Path) -> tuple[str, Path]:
    """Write a configuration of the example whose environment keeps a journal; return the paths of both."""
    example = REPOSITORY / "examples/configs/grpo_sliding_puzzle_cpu.yaml"
    puzzle = yaml.safe_load(example.read_text())["env"]["sliding_puzzle_game"]
    environment, journal = "journaled_puzzle.JournaledPuzzle", folder / "journal"
    config = {
        "defaults": str(example),
        "data": {"default": {"env_name": environment}},
        "env": {environment: puzzle | {"journal": str(journal)}},
        "policy": {"generation": {"stop_strings": [ACTION_END]}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path), journal


def started(start: StartExample, folder: Path, name: str, *overrides: str) -> tuple[ExampleRun, Path]:
    """Start a run with checkpoints in `folder` and its logs below `name`; return it and the journal of all runs."""
    config, journal = journaled(folder)
    overrides = (*SHORT, *overrides, f"checkpointing.checkpoint_dir={folder}/checkpoints")
    environment = {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}"}
    return start("run_grpo.py", config, *overrides, logs=name, environment=environment), journal


def uninterrupted(start: StartExample, folder: Path, *overrides: str) -> ExampleRun:
    run, journal = started(start, folder, "uninterrupted", *overrides, "checkpointing.enabled=false")
    assert run.finish() == 0, run.log()[-3000:]
    journal.unlink()
    return run


def killed_and_resumed(start: StartExample, folder: Path, *overrides: str) -> tuple[ExampleRun, ExampleRun]:
    """Kill a run with SIGKILL in the middle of the episodes after its third step, and resume it from its second."""
    killed, journal = started(start, folder, "killed", *overrides)
    killed.wait_for("step 3/")
    wait_for_second_turns(killed, journal)
    killed.process.kill()
    killed.finish()
    assert killed.survivors() == []
    events = events_of(journal)
    assert events["open"] > events["end"], "no episode was being played"
    assert f"step {NUM_STEPS}/" not in killed.log()

    resumed, _ = started(start, folder, "resumed", *overrides)
    assert resumed.finish() == 0, resumed.log()[-3000:]
    assert "Resuming from" in resumed.log()
    return killed, resumed


def wait_for_second_turns(run: ExampleRun, journal: Path, timeout_s: float = 60) -> None:
    """Wait until episodes opened after now have a second turn and others are still being played."""
    run.processes()
    before, end = events_of(journal), time.monotonic() + timeout_s
    while time.monotonic() < end:
        now = events_of(journal)
        if now["turn 2"] > before["turn 2"] and now["open"] > now["end"]:
            return
        assert run.process.poll() is None, run.log()[-3000:]
        time.sleep(0.01)
    raise AssertionError(f"No further episode has a second turn: {events_of(journal)}")


def events_of(journal: Path) -> Counter[str]:
    return Counter(journal.read_text().splitlines() if journal.exists() else [])


def metrics_of(*runs: ExampleRun) -> Metrics:
    """Return the metrics of training; those of a later run replace earlier ones."""
    metrics: Metrics = {}
    for run in runs:
        metrics |= of_training(read_metrics(run.log_dir))
    return metrics


@pytest.mark.parametrize("mode", [pytest.param((), id="none"), pytest.param(FIXED_SCHEDULE, id="ahead")])
def test_metrics_are_equal_bit_for_bit(start_example: StartExample, tmp_path: Path, mode: tuple[str, ...]) -> None:
    expected = metrics_of(uninterrupted(start_example, tmp_path, *mode))
    assert {step for _, step, _ in expected} == set(range(1, NUM_STEPS + 1))
    runs = killed_and_resumed(start_example, tmp_path, *mode)
    assert min(step for _, step, _ in metrics_of(runs[1])) == 3
    assert metrics_of(*runs) == expected


@pytest.mark.parametrize("responses", ["continue", "restart"])
def test_episodes_in_a_checkpoint_are_played_to_the_same_end(
    start_example: StartExample, tmp_path: Path, responses: str
) -> None:
    """With updates in flight, groups are trained on in the order in which they finish; all have equal tokens."""
    run = partial(killed_and_resumed, start_example, tmp_path)
    expected = sequences(trained(uninterrupted(start_example, tmp_path, *SAME_WEIGHTS, *LIKELIEST)))
    assert expected.total() == NUM_STEPS * EPISODES_PER_STEP
    runs = run(*IN_FLIGHT, *SAME_WEIGHTS, *LIKELIEST, f"grpo.overlap.partial_responses={responses}")
    continued, restarted = resumed_tokens(runs[1])
    assert (continued > 0, restarted > 0) == (responses == "continue", responses == "restart")
    assert sequences(trained(*runs)) == expected
