"""Distillation from a teacher with another tokenizer, end to end on the CPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import REPOSITORY, ExampleRuns, Metrics, StartExample, finished, killed_and_resumed
from make_tiny_pair_model import make_pair_model

from examples.chain_data import main as chain_data
from examples.chain_data import questions, worked

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(2400)]

SCRIPT, CONFIG = "run_distillation.py", "distillation_math_cpu.yaml"
STEPS = 40
KINDS = ("gold_loss", "xtoken_loss")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model with two-digit tokens that the library's SFT has trained on sums."""
    folder = tmp_path_factory.mktemp("teacher")
    make_pair_model(folder / "untrained")
    runs = ExampleRuns(folder)
    chain_data([str(folder / "results/sums")])
    overrides = (f"policy.model_name={folder}/untrained",)
    finished(runs.start, "run_sft.py", "../use_cases/pairs_sft.yaml", overrides, folder)
    yield folder / "checkpoints/step_400/policy/weights/model"
    runs.close()


def keys_of(teacher: Path, kind: str, steps: int) -> tuple[str, ...]:
    return (
        f"teacher.model_name={teacher}",
        f"loss_fn.{kind}=true",
        f"distillation.max_num_steps={steps}",
        f"distillation.val_period={steps}",
        f"checkpointing.save_period={steps // 2}",
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_student_learns_from_a_teacher_with_other_tokens(kind, teacher, start_example, tmp_path) -> None:
    metrics = finished(start_example, SCRIPT, CONFIG, keys_of(teacher, kind, STEPS), tmp_path)
    assert metrics["validation", STEPS, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.3
    assert metrics["train", STEPS, "forward_kl"] < 0.5 * metrics["train", 1, "forward_kl"]
    assert metrics["train", STEPS, "teacher/num_unread"] == 0


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(teacher, start_example: StartExample, tmp_path) -> None:
    killed_and_resumed(start_example, SCRIPT, CONFIG, keys_of(teacher, "gold_loss", 12), tmp_path, steps=12)


def test_the_student_as_its_own_teacher_has_no_loss(start_example: StartExample, tmp_path) -> None:
    own = ("distillation.topk_logits_k=264", "loss_fn.vocab_topk=264")
    keys = keys_of(REPOSITORY / "examples/assets/tiny-chat", "gold_loss", 2)
    metrics: Metrics = finished(start_example, SCRIPT, CONFIG, (*keys, *own), tmp_path)
    assert abs(metrics["train", 1, "loss"]) < 1e-6
    assert metrics["train", 1, "unmatched_distance"] == 0
    assert metrics["train", 1, "spans_per_token"] == 1
    assert metrics["train", 1, "grad_norm"] < 1e-4


def texts(folder: Path, num_rows: int, seed: int) -> Path:
    """Write sums as plain texts, for SFT without a chat template."""
    rows = [f"{question}{worked(left, right)}" for question, left, right in questions(num_rows, seed=seed)]
    path = folder / f"texts_{seed}.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def of_texts(train: Path, held_out: Path, steps: int) -> tuple[str, ...]:
    """Return the overrides of an SFT run on plain texts."""
    return (
        f"data.train={{dataset_name: arrow_text, data_path: {train}}}",
        f"data.validation={{dataset_name: arrow_text, data_path: {held_out}}}",
        f"sft.max_num_steps={steps}",
        "sft.max_num_epochs=1000",
        f"sft.val_period={steps}",
        f"checkpointing.save_period={steps}",
    )


@pytest.mark.long
def test_a_teacher_of_written_texts_helps_where_they_are_few(start_example: StartExample, tmp_path) -> None:
    """The teacher has read 4000 texts, the student 64: with the teacher, its loss on new texts is smaller."""
    make_pair_model(tmp_path / "untrained")
    many, few, held_out = texts(tmp_path, 4000, 1), texts(tmp_path, 64, 2), texts(tmp_path, 256, 3)
    own = (f"policy.model_name={tmp_path}/untrained", "sft.val_period=0")
    finished(
        start_example,
        "run_sft.py",
        "../use_cases/pairs_sft.yaml",
        (*of_texts(many, held_out, 400), *own),
        tmp_path / "t",
    )
    steps = 60
    student = of_texts(few, held_out, steps)
    teacher = (
        f"teacher.model_name={tmp_path}/t/checkpoints/step_400/policy/weights/model",
        "teacher_loss_fn.xtoken_loss=true",
        "teacher_loss_fn.vocab_topk=360",
        "teacher_loss_fn.kl_type=forward",
    )
    alone = finished(start_example, "run_sft.py", "sft_cpu.yaml", student, tmp_path / "alone")
    taught = finished(start_example, "run_sft.py", "sft_cpu.yaml", (*student, *teacher), tmp_path / "taught")
    assert taught["train", steps, "forward_kl"] < 0.5 * taught["train", 1, "forward_kl"]
    assert taught["train", steps, "teacher/num_unread"] == 0
    nll = {
        name: each["validation", steps, key]
        for name, each, key in (("alone", alone, "val_loss"), ("taught", taught, "nll"))
    }
    assert nll["taught"] < nll["alone"] - 0.05, nll
