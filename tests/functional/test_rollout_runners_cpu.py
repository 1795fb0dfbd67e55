"""GRPO whose rollouts are played by runner actors: the same numbers as without, also if a runner and an engine die."""

from pathlib import Path

import pytest
import yaml
from example_runs import (
    REPOSITORY,
    ExampleRun,
    GRPOExample,
    Metrics,
    StartExample,
    finished,
    killed_and_resumed,
    of_training,
    read_metrics,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
ONE = "cluster.rollout_runners=1"
OVERRIDES = ("grpo.max_num_steps=8", "checkpointing.enabled=false", "grpo.val_period=2", ONE)
SHORT = ("grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_period=3", "checkpointing.enabled=false")
ROUNDED = "advantages/mean"
"""A mean over tokens that the driver computes from the means of samples."""
GAME = '''
import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class LongAnswers(EnvironmentInterface):
    """Rewards each of two turns by the length of its answer."""

    post_processes_groups = True

    def __init__(self, cfg):
        self.most = cfg["characters"]

    def step(self, message_log_batch, metadata):
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        lengths = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "And again?"}] * len(turns),
            metadata=metadata,
            next_stop_strings=[None] * len(turns),
            rewards=(lengths / self.most).clamp(max=1.0),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
        )
'''

REWARDS = """
import asyncio


def is_right(answers, rows):
    return [float(row["ground_truth"] in answer) for answer, row in zip(answers, rows)]


async def is_short(answer, row):
    await asyncio.sleep(0.001)
    return float(len(answer) < 10 + len(row["ground_truth"]))


def has_digits(answer):
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)
"""


def without_mean(metrics: Metrics) -> Metrics:
    return {key: value for key, value in metrics.items() if key[2] != ROUNDED}


def check_equal(found: Metrics, expected: Metrics) -> None:
    assert without_mean(found) == without_mean(expected)
    means = {key: value for key, value in expected.items() if key[2] == ROUNDED}
    assert {key: found[key] for key in means} == pytest.approx(means, abs=1e-6)


def check_same(run: ExampleRun, expected: Metrics) -> None:
    assert run.finish() == 0, run.log()[-3000:]
    check_equal(of_training(read_metrics(run.log_dir)), expected)


def test_a_run_with_a_runner_that_dies_has_the_numbers_of_one_without_runners(
    grpo_example: GRPOExample, start_example: StartExample
) -> None:
    run = start_example("run_grpo.py", CONFIG, *OVERRIDES)
    run.wait_for("step 3/")
    run.kill("ray::RunnerActor")
    check_same(run, grpo_example.metrics)
    assert "The actor of rollout runner '0' ended" in run.log()


@pytest.mark.long
def test_an_engine_of_a_runner_that_dies_is_replaced(grpo_example: GRPOExample, start_example: StartExample) -> None:
    run = start_example("run_grpo.py", CONFIG, *OVERRIDES)
    run.wait_for("step 3/")
    run.kill("ray::GenerationWorker", "ray::vllm_engine")
    check_same(run, grpo_example.metrics)
    assert "Generation engine 0 died" in run.log()


@pytest.mark.long
def test_a_fixed_schedule_ahead_is_that_of_a_run_without_runners_also_after_a_kill(
    start_example: StartExample, tmp_path: Path
) -> None:
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=3")
    overrides += ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2")
    killed = killed_and_resumed(start_example, "run_grpo.py", CONFIG, (*overrides, ONE), tmp_path, steps=8)
    plain = start_example("run_grpo.py", CONFIG, *overrides, "checkpointing.enabled=false", logs="plain")
    assert plain.finish() == 0, plain.log()[-3000:]
    check_equal(killed, of_training(read_metrics(plain.log_dir)))


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"),
        ("policy.train_global_batch_size=32", "loss_fn.reference_policy_kl_penalty=0.1"),
        ("grpo.seq_logprob_error_threshold=2.0",),
    ],
    ids=["dynamic sampling", "several updates with a reference", "masked sequences"],
)
def test_other_features_have_the_numbers_of_a_run_without_runners(
    start_example: StartExample, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    expected = finished(start_example, "run_grpo.py", CONFIG, (*overrides, *SHORT), tmp_path)
    check_same(start_example("run_grpo.py", CONFIG, *overrides, *SHORT, ONE, logs="runner"), expected)


@pytest.mark.long
def test_several_turns_in_several_environments_have_the_numbers_of_a_run_without_runners(
    start_example: StartExample, tmp_path: Path
) -> None:
    (tmp_path / "my_game.py").write_text(GAME, encoding="utf-8")
    sums = {"dataset_name": "arithmetic", "num_samples": 64, "split_validation_size": 0.0}
    tree = {
        "defaults": str(REPOSITORY / "examples/configs" / CONFIG),
        "data": {"train": [sums | {"seed": 1}, sums | {"seed": 2, "env_name": "my_game.LongAnswers"}]},
        "env": {"my_game.LongAnswers": {"characters": 40}},
    }
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    overrides = ("grpo.max_rollout_turns=2", *SHORT)
    expected = finished(start_example, "run_grpo.py", str(config), overrides, tmp_path)
    assert expected["train", 1, "avg_turns_per_sample"] > 1
    check_same(start_example("run_grpo.py", str(config), *overrides, ONE, logs="runner"), expected)


@pytest.mark.long
def test_reward_functions_of_environments_with_names_of_their_own_have_the_numbers_of_a_run_without_runners(
    start_example: StartExample, tmp_path: Path
) -> None:
    (tmp_path / "my_functions.py").write_text(REWARDS, encoding="utf-8")
    sums = {"dataset_name": "arithmetic", "num_samples": 64, "split_validation_size": 0.0}
    rewards = {"right": "my_functions.is_right", "short": "my_functions.is_short"}
    tree = {
        "defaults": str(REPOSITORY / "examples/configs" / CONFIG),
        "data": {
            "train": [sums | {"seed": 1, "env_name": "my_rewards"}, sums | {"seed": 2, "env_name": "more_rewards"}],
            "validation": [
                sums | {"seed": 3, "env_name": "my_rewards"},
                sums | {"seed": 4, "env_name": "more_rewards"},
            ],
        },
        "env": {
            "my_rewards": {"function": rewards, "weights": {"short": 0.25}, "num_workers": 2},
            "more_rewards": {"function": "my_functions.has_digits"},
        },
    }
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    expected = finished(start_example, "run_grpo.py", str(config), SHORT, tmp_path)
    for step in (1, 2, 3):
        assert expected["train", step, "num_reward_errors"] == 0
        assert 0 <= expected["train", step, "short"] <= 0.25
        assert 0 < expected["train", step, "more_rewards/reward"] < 1
        both = expected["train", step, "right"] + expected["train", step, "short"]
        assert expected["train", step, "my_rewards/reward"] == pytest.approx(both)
    assert 0 < expected["validation", 3, "my_rewards/accuracy"] < 1.25
    check_same(start_example("run_grpo.py", str(config), *SHORT, ONE, logs="runner"), expected)
