"""Rates of a step: tokens, operations and utilisation, against hand counts."""

import logging
import re

import pytest
from run_parts import Counted

from nemo_rl.algorithms.runtime.throughput import Throughput
from nemo_rl.models.huggingface.sizes import ModelFlops
from nemo_rl.models.policy.workers import costs as work_module
from nemo_rl.models.policy.workers.costs import PassCosts, WorkCount

pytestmark = pytest.mark.fast

FLOPS = ModelFlops(trained=1e9, frozen=0.0, attention=((64, None, 2),))
STEP = {"total_num_tokens": 600.0, "num_samples": 3.0, "mean_gen_tokens_per_sample": 50.0}
TIMINGS = {"total_step_time": 10.0, "generation": 3.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the clock of passes be a list with one number, which tests change."""
    now = [0.0]
    monkeypatch.setattr(work_module.time, "perf_counter", lambda: now[0])
    return now


def run_passes(costs: PassCosts, clock: list[float]) -> Counted:
    model = Counted(WorkCount(lambda: costs))
    for seconds, kind, lengths in (
        (1.0, "scoring", [100, 500]),
        (2.5, "training", [100, 300]),
        (1.5, "training", [200]),
    ):
        with model.work.of(kind, lengths):
            clock[0] += seconds
    return model


def test_rates_of_gpus(clock: list[float]) -> None:
    model = run_passes(PassCosts(FLOPS, "NVIDIA H100 80GB HBM3"), clock)
    found = Throughput(model, "bfloat16", policy_devices=2, devices=4, uses_gpu=True).of_step(STEP, TIMINGS)
    squares = 100**2 + 300**2 + 200**2
    train = (3 * 2 * 1e9 * 600 + 3 * 2 * 64 * 2 * squares) / 4.0 / 1e12
    assert found["tokens_per_sec"] == 60.0 and found["tokens_per_sec_per_gpu"] == 15.0
    assert found["samples_per_sec_per_gpu"] == pytest.approx(0.075)
    assert found["generation_tokens_per_sec"] == 50.0 and found["generation_tokens_per_sec_per_gpu"] == 12.5
    assert found["policy_training_tokens_per_sec"] == 150.0
    assert found["policy_training_tokens_per_sec_per_gpu"] == 75.0
    assert found["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] == 300.0
    assert found["training_worker_group_tokens_per_sec"] == 240.0
    assert found["train_tflops"] == pytest.approx(train)
    assert found["train_flops_per_gpu"] == pytest.approx(train / 2)
    assert found["train_fp_utilization"] == pytest.approx(train / 2 / 989.4)
    assert found["logprob_tflops"] == pytest.approx((2e9 * 600 + 2 * 64 * 2 * (100**2 + 500**2)) / 1e12)


def test_rates_of_cores_have_no_utilisation(clock: list[float]) -> None:
    model = run_passes(PassCosts(FLOPS, None), clock)
    found = Throughput(model, "float32", policy_devices=1, devices=8, uses_gpu=False).of_step(STEP, TIMINGS)
    assert found["tokens_per_sec_per_core"] == 7.5 and found["train_tflops"] > 0
    assert not [name for name in found if "gpu" in name or "utilization" in name]


def test_a_step_counts_its_own_passes_only(clock: list[float]) -> None:
    model = run_passes(PassCosts(FLOPS, None), clock)
    throughput = Throughput(model, "float32", 1, 8, uses_gpu=False)
    throughput.of_step(STEP, TIMINGS)
    assert "train_tflops" not in throughput.of_step(STEP, TIMINGS)


def test_passes_between_steps_do_not_count(clock: list[float]) -> None:
    model = run_passes(PassCosts(FLOPS, None), clock)
    throughput = Throughput(model, "float32", 1, 8, uses_gpu=False)
    throughput.begin_step()
    with model.work.of("scoring", [10]):
        clock[0] += 2.0
    assert throughput.of_step(STEP, TIMINGS)["policy_and_reference_logprobs_tokens_per_sec"] == 5.0


def test_shared_tokens_are_counted_by_kind(clock: list[float]) -> None:
    model = run_passes(PassCosts(FLOPS, None), clock)
    for shared in (30, 12):
        with model.work.of("training", [100], shared):
            clock[0] += 1.0
    found = Throughput(model, "float32", 1, 8, uses_gpu=False).of_step(STEP, TIMINGS)
    assert found["policy_training_shared_tokens"] == 42.0
    assert found["policy_and_reference_logprobs_shared_tokens"] == 0.0
    assert found["policy_training_tokens_per_sec"] == pytest.approx(800 / 6.0), "shared tokens count for each row"


def test_rollouts_beside_training_have_no_rate_of_a_phase() -> None:
    throughput = Throughput(Counted(WorkCount(lambda: PassCosts(None, None))), "float32", 1, 8, False, False)
    assert not [name for name in throughput.of_step(STEP, TIMINGS) if name.startswith("generation")]


def test_counts_that_nobody_takes_need_no_more_memory() -> None:
    work = WorkCount(lambda: PassCosts(None, None))
    for _ in range(100):
        with work.of("scoring", [3, 5, 3]):
            pass
    lengths = work.take()["scoring"].lengths
    assert lengths == {3: 200, 5: 100} and len(lengths) == 2


def test_a_failed_description_is_asked_for_again_a_few_times(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    failed, answers = PassCosts(None, None, "the rank did not answer", is_failure=True), []

    def describe() -> PassCosts:
        answers.append(failed if len(answers) < 1 else PassCosts(FLOPS, None))
        return answers[-1]

    throughput = Throughput(Counted(WorkCount(describe)), "float32", 1, 8, uses_gpu=False)
    steps = []
    with caplog.at_level(logging.INFO, "nemo_rl"):
        for _ in range(3):
            with throughput.policy.work.of("training", [7]):
                clock[0] += 1.0
            steps.append(throughput.of_step(STEP, TIMINGS))
    assert ["train_tflops" in step for step in steps] == [False, True, True]
    assert len(answers) == 2 and len(caplog.messages) == 1
    lost = WorkCount(lambda: answers.append(failed) or failed)
    assert [lost.costs for _ in range(9)] == [failed] * 9
    assert len(answers) == 2 + 3


def test_a_pass_that_fails_does_not_count() -> None:
    work = WorkCount(lambda: PassCosts(FLOPS, None))
    with pytest.raises(ValueError, match="lost"), work.of("training", [5]):
        raise ValueError("lost")
    assert work.take()["training"].tokens == 0


@pytest.mark.parametrize(
    ("costs", "precision", "reason"),
    [
        (PassCosts(FLOPS, "Graphics Card 9"), "bfloat16", "the peak of Graphics Card 9 is not known"),
        (PassCosts(FLOPS, "NVIDIA H100"), "float32", "it is float32"),
        (PassCosts(None, "NVIDIA H100", "KeyError: x"), "bfloat16", "cannot be counted.*KeyError: x"),
    ],
)
def test_what_is_not_reported_is_said_once(
    costs: PassCosts, precision: str, reason: str, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    throughput = Throughput(run_passes(costs, clock), precision, 1, 1, uses_gpu=True)
    with caplog.at_level(logging.INFO, "nemo_rl"):
        first = throughput.of_step(STEP, TIMINGS)
        with throughput.policy.work.of("training", [7]):
            clock[0] += 1.0
        throughput.of_step(STEP, TIMINGS)
    assert not [name for name in first if "utilization" in name]
    assert len(caplog.messages) == 1
    assert re.search(reason, caplog.messages[0])
