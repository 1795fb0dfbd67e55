"""GRPO with teachers end to end on the CPU: it learns without rewards, and resumes bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import REPOSITORY, ExampleRuns, Metrics, StartExample, finished, killed_and_resumed
from make_tiny_pair_model import make_pair_model
from vllm_server import vllm_server

from examples.chain_data import main as chain_data
from examples.chain_data import questions, worked

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT, CONFIG = "run_grpo.py", "grpo_opd_cpu.yaml"
STEPS = 12
OVERRIDES = (f"grpo.max_num_steps={STEPS}", f"grpo.val_period={STEPS}", f"checkpointing.save_period={STEPS // 2}")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """Return the metrics of a run."""
    folder = tmp_path_factory.mktemp("opd")
    runs = ExampleRuns(folder)
    yield finished(runs.start, SCRIPT, CONFIG, OVERRIDES, folder)
    runs.close()


def test_the_policy_learns_from_the_teacher_without_rewards(taught: Metrics) -> None:
    assert taught["validation", STEPS, "accuracy"] > taught["validation", 0, "accuracy"] + 0.2
    first, last = (taught["train", step, "teachers.math/reverse_kl"] for step in (1, STEPS))
    assert 0 < last < 0.5 * first


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    killed_and_resumed(start_example, SCRIPT, CONFIG, OVERRIDES, tmp_path, steps=STEPS)


@pytest.mark.long
def test_sampling_ahead_with_a_separate_teacher_and_adapters_learns(start_example: StartExample, tmp_path) -> None:
    metrics = finished(
        start_example,
        SCRIPT,
        CONFIG,
        (
            *OVERRIDES,
            "grpo.max_num_steps=40",
            "grpo.val_period=40",
            "grpo.overlap.mode=ahead",
            "on_policy_distillation.non_colocated_teachers.enabled=true",
            "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 16, alpha: 32}",
            "policy.optimizer.kwargs.lr=2e-3",
        ),
        tmp_path,
    )
    assert metrics["validation", 40, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.1


@pytest.mark.long
def test_the_policy_as_its_own_teacher_changes_nothing(start_example: StartExample, tmp_path) -> None:
    own = "on_policy_distillation.teacher_model_by_agent_name={math: examples/assets/tiny-chat}"
    metrics = finished(start_example, SCRIPT, CONFIG, (own, "grpo.max_num_steps=1", "grpo.val_period=1"), tmp_path)
    assert metrics["train", 1, "advantages/max"] == metrics["train", 1, "advantages/min"] == 0
    assert metrics["train", 1, "grad_norm"] == 0
    assert metrics["validation", 1, "accuracy"] == metrics["validation", 0, "accuracy"]


@pytest.mark.long
def test_a_teacher_of_a_vllm_server_gives_the_numbers_of_a_model_of_the_run(
    start_example: StartExample, taught: Metrics, tmp_path
) -> None:
    with vllm_server(tmp_path, "examples/assets/tiny-teacher") as address:
        overrides = (
            "~on_policy_distillation.teacher_model_by_agent_name",
            f"on_policy_distillation.endpoints.math={{base_url: '{address}', model: tiny}}",
            "grpo.max_num_steps=2",
            "grpo.val_period=0",
        )
        metrics = finished(start_example, SCRIPT, CONFIG, overrides, tmp_path)
    for name in ("teachers.math/reverse_kl", "advantages/max", "advantages/min", "grad_norm"):
        assert metrics["train", 1, name] == pytest.approx(taught["train", 1, name], rel=1e-3)


def taught_by(start: StartExample, teacher: Path, folder: Path, *overrides: str) -> Metrics:
    """Return the metrics of 40 steps with a teacher."""
    own = f"on_policy_distillation.teacher_model_by_agent_name={{math: {teacher}}}"
    return finished(start, SCRIPT, CONFIG, (own, "grpo.max_num_steps=40", "grpo.val_period=20", *overrides), folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_teacher_with_two_digit_tokens_teaches_a_student_with_single_digits(
    start_example: StartExample, tmp_path
) -> None:
    """The library's SFT makes the teacher. It is compared with rewards, and with a teacher with equal tokens."""
    make_pair_model(tmp_path / "untrained")
    chain_data([str(tmp_path / "results/sums")])
    sft = (f"policy.model_name={tmp_path}/untrained",)
    finished(start_example, "run_sft.py", "../use_cases/pairs_sft.yaml", sft, tmp_path / "sft")
    pairs = tmp_path / "sft/checkpoints/step_400/policy/weights/model"
    rate = "policy.optimizer.kwargs.lr=3e-4"
    text = taught_by(start_example, pairs, tmp_path / "text", "on_policy_distillation.compares=text", rate)
    equal = taught_by(start_example, REPOSITORY / "examples/assets/tiny-teacher", tmp_path / "equal", rate)
    grpo = ("grpo.max_num_steps=40", "grpo.val_period=20", rate)
    rewarded = finished(start_example, SCRIPT, "grpo_math_cpu.yaml", grpo, tmp_path / "grpo")
    gains = {
        name: metrics["validation", 40, "accuracy"] - metrics["validation", 0, "accuracy"]
        for name, metrics in {"text": text, "equal": equal, "rewarded": rewarded}.items()
    }
    assert gains["text"] > 0.3, gains
    assert gains["text"] > gains["rewarded"] - 0.1, gains
    assert text["train", 40, "teachers.math/reverse_kl"] < 0.5 * text["train", 1, "teachers.math/reverse_kl"]
    assert text["train", 40, "teachers.math/num_unread"] == 0


HINT = "It is {ground_truth}."


@pytest.mark.long
def test_a_policy_that_can_use_hints_teaches_itself(start_example: StartExample, tmp_path) -> None:
    """SFT teaches a model to use the result of a sum; then it learns sums from itself, without rewards."""
    rows = [
        {"messages": [{"role": "user", "content": f"{question}\n\n{HINT.format(ground_truth=left + right)}"}, answer]}
        for question, left, right in questions(4000, seed=3)
        for answer in [{"role": "assistant", "content": worked(left, right)}]
    ]
    (tmp_path / "hints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train = f"data.train={{dataset_name: openai_format, data_path: {tmp_path}/hints.jsonl}}"
    off = ("sft.val_at_start=false", "sft.val_at_end=false")
    sft = (
        train,
        "data.validation=null",
        "sft.max_num_steps=120",
        "sft.val_period=0",
        "policy.max_total_sequence_length=96",
        *off,
    )
    finished(start_example, "run_sft.py", "sft_cpu.yaml", sft, tmp_path / "sft")
    hinted = tmp_path / "sft/checkpoints/step_120/policy/weights/model"
    section = "on_policy_distillation.self_distillation"
    overrides = (
        f"policy.model_name={hinted}",
        "~on_policy_distillation.teacher_model_by_agent_name",
        f"{section}.enabled=true",
        f"{section}.context='{HINT}'",
        f"{section}.weights=initial",
        "policy.optimizer.kwargs.lr=3e-4",
        "grpo.max_num_steps=40",
        "grpo.val_period=20",
    )
    metrics = finished(start_example, SCRIPT, CONFIG, overrides, tmp_path / "self")
    assert metrics["validation", 40, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.15
    assert metrics["train", 40, "self_teacher/reverse_kl"] < 0.5 * metrics["train", 1, "self_teacher/reverse_kl"]
