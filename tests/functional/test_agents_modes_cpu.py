"""Agent programs ahead of training, with runner actors, and when parts of the run die in the middle of programs."""

import json
import re
import time
from pathlib import Path

import pytest
from example_runs import ExampleRun, Metrics, StartExample, killed_and_resumed, of_training, read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

CONFIG = "grpo_agent_cpu.yaml"
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
)
SHORT = (*SMALL, "grpo.max_num_steps=4", "checkpointing.enabled=false")
RUNNER = "cluster.rollout_runners=1"
TIMES = ("agent/mean_program_s",)
ROUNDED = "advantages/mean"
"""A mean over tokens that the driver computes from the means of samples."""
SLOW = """
import asyncio

from calculator_agent import solve as once


async def solve(task):
    result = await once(task)
    await asyncio.sleep(SECONDS)
    return result
"""


def numbers(run: ExampleRun) -> Metrics:
    assert run.finish(600) == 0, run.log()[-3000:]
    found = of_training(read_metrics(run.log_dir))
    assert {value for key, value in found.items() if key[2] == "num_reward_errors"} == {0}
    return {key: value for key, value in found.items() if key[2] not in TIMES}


def check_equal(found: Metrics, expected: Metrics) -> None:
    assert found.keys() == expected.keys()
    far = {
        key: (value, found[key])
        for key, value in expected.items()
        if (key[2] != ROUNDED and found[key] != value)
        or (key[2] == ROUNDED and found[key] != pytest.approx(value, abs=1e-6))
    }
    assert not far


def slow_programs(folder: Path, seconds: float) -> tuple[str, str]:
    """Write a program that lasts at least some seconds; return the overrides that use it."""
    (folder / "slow_agent.py").write_text(SLOW.replace("SECONDS", str(seconds)), encoding="utf-8")
    return ("env.agent.program=slow_agent.solve", "env.agent.max_open_episodes=4")


def test_runners_serve_programs_with_the_numbers_of_the_driver(start_example: StartExample) -> None:
    expected = numbers(start_example("run_grpo.py", CONFIG, *SHORT, logs="driver"))
    check_equal(numbers(start_example("run_grpo.py", CONFIG, *SHORT, RUNNER, logs="runner")), expected)


def test_programs_run_ahead_of_training_with_weights_that_change(start_example: StartExample) -> None:
    ahead = ("grpo.overlap.mode=ahead", "grpo.overlap.order=ready_first", "grpo.overlap.in_flight_weight_updates=true")
    found = numbers(start_example("run_grpo.py", CONFIG, *SHORT, *ahead))
    assert found["train", 4, "max_trajectory_age"] == 1.0
    assert found["train", 4, "calls_per_sample"] >= 1


def test_a_fixed_schedule_ahead_is_equal_after_a_kill(start_example: StartExample, tmp_path: Path) -> None:
    overrides = (*SMALL, "grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.overlap.mode=ahead")
    killed = killed_and_resumed(start_example, "run_grpo.py", CONFIG, overrides, tmp_path, steps=8)
    assert max(step for _, step, _ in killed) == 8


def test_an_engine_that_dies_under_programs_costs_no_sample(start_example: StartExample, tmp_path: Path) -> None:
    expected = numbers(start_example("run_grpo.py", CONFIG, *SHORT, logs="calm"))
    slow = slow_programs(tmp_path, 0.5)
    run = start_example("run_grpo.py", CONFIG, *SHORT, *slow)
    run.wait_for("step 2/")
    run.kill("ray::GenerationWorker", "ray::vllm_engine")
    check_equal(numbers(run), expected)
    assert "Generation engine 0 died" in run.log()


def test_a_runner_that_dies_serves_its_programs_again(start_example: StartExample, tmp_path: Path) -> None:
    """Its endpoint dies with it, so its programs fail; their samples are played again from their prompts."""
    expected = numbers(start_example("run_grpo.py", CONFIG, *SHORT, logs="calm"))
    slow = slow_programs(tmp_path, 0.5)
    run = start_example("run_grpo.py", CONFIG, *SHORT, *slow, RUNNER)
    run.wait_for("step 2/")
    run.kill("ray::RunnerActor")
    check_equal(numbers(run), expected)
    assert "The actor of rollout runner '0' ended" in run.log()
    assert run.survivors() == []


def test_a_process_of_programs_that_dies_is_replaced_and_runs_them_again(
    start_example: StartExample, tmp_path: Path
) -> None:
    expected = numbers(start_example("run_grpo.py", CONFIG, *SHORT, logs="calm"))
    slow = slow_programs(tmp_path, 2.0)
    run = start_example("run_grpo.py", CONFIG, *SHORT, *slow)
    run.wait_for("step 1/")
    time.sleep(1.0)
    run.kill("ray::AgentEnvironment", "ray::EnvironmentActor")
    check_equal(numbers(run), expected)
    assert "The actor of environment 'agent' ended" in run.log()
    assert run.survivors() == []


def test_a_driver_that_dies_leaves_no_program(start_example: StartExample, tmp_path: Path) -> None:
    slow = slow_programs(tmp_path, 60.0)
    run = start_example("run_grpo.py", CONFIG, *SHORT, *slow)
    run.wait_for(r"[Ss]ampling|step 0/|Training starts|step 1", timeout_s=180)
    time.sleep(8.0)
    run.processes()
    run.process.kill()
    run.finish()
    assert run.survivors() == []
    keys = re.findall(r"sk-[\w-]{20,}", run.log() + json.dumps([str(path) for path in run.log_dir.rglob("*")]))
    assert keys == []
