"""GRPO whose rollouts are played by runner actors: the same numbers as without, also if a runner and an engine die."""

import pytest
from example_runs import ExampleRun, GRPOExample, StartExample, of_training, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

OVERRIDES = ("grpo.max_num_steps=8", "checkpointing.enabled=false", "grpo.val_period=2", "cluster.rollout_runners=1")
ROUNDED = "advantages/mean"
"""A mean over tokens that the driver computes from the means of samples."""


def without_mean(metrics: dict[tuple[str, int, str], float]) -> dict[tuple[str, int, str], float]:
    return {key: value for key, value in metrics.items() if key[2] != ROUNDED}


def check_same(run: ExampleRun, expected: dict[tuple[str, int, str], float]) -> None:
    assert run.finish() == 0, run.log()[-3000:]
    found = of_training(read_metrics(run.log_dir))
    assert without_mean(found) == without_mean(expected)
    means = {key: value for key, value in expected.items() if key[2] == ROUNDED}
    assert {key: found[key] for key in means} == pytest.approx(means, abs=1e-6)


def test_a_run_with_a_runner_that_dies_has_the_numbers_of_one_without_runners(
    grpo_example: GRPOExample, start_example: StartExample
) -> None:
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *OVERRIDES)
    run.wait_for("step 3/")
    run.kill("ray::RunnerActor")
    check_same(run, grpo_example.metrics)
    assert "The actor of rollout runner '0' ended" in run.log()


@pytest.mark.long
def test_an_engine_of_a_runner_that_dies_is_replaced(grpo_example: GRPOExample, start_example: StartExample) -> None:
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *OVERRIDES)
    run.wait_for("step 3/")
    run.kill("ray::GenerationWorker")
    check_same(run, grpo_example.metrics)
    assert "Generation engine 0 died" in run.log()
