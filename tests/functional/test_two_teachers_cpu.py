"""Two tasks, each with a teacher that knows only this task: a student learns both, and only one from one teacher."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import REPOSITORY, ExampleRuns, Metrics, StartExample, finished, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.long]

PRODUCTS = "small_products.Products"
KNOWN = "dataset_name: arithmetic_products, split: train, min_operand: 2, max_operand: 9"
DATA = f"""
data:
  train:
    - {{name: sums, weight: 1, dataset_name: arithmetic, num_samples: 4000, seed: 1}}
    - {{name: products, weight: 1, {KNOWN}, num_samples: 64, env_name: {PRODUCTS}}}
  validation:
    - {{name: sums_test, dataset_name: arithmetic, num_samples: 64, seed: 2}}
    - {{name: products_test, {KNOWN}, num_samples: 64, env_name: {PRODUCTS}}}
env:
  {PRODUCTS}: {{}}
logger:
  tensorboard_enabled: false
"""
OF_TOKENS = f"""
defaults: {REPOSITORY}/examples/configs/grpo_opd_cpu.yaml
grpo:
  max_num_steps: 1
  val_period: 0
  val_at_start: false
{DATA}"""
STEPS = 160


def over_vocabulary(product_teacher: Path) -> str:
    """Return a configuration for distillation from a teacher for each task."""
    return f"""
defaults: {REPOSITORY}/examples/configs/distillation_math_cpu.yaml
distillation:
  max_num_steps: {STEPS}
  val_period: {STEPS // 4}
policy:
  optimizer: {{kwargs: {{lr: 1.0e-3}}}}
teachers:
  math: {{model_name: {REPOSITORY}/examples/assets/tiny-teacher}}
  {PRODUCTS}: {{model_name: {product_teacher}}}
{DATA}"""


@pytest.fixture(scope="module")
def product_teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny chat model after SFT on products alone, which makes it forget sums."""
    folder = tmp_path_factory.mktemp("products")
    rows = [(f"{a}*{b}=", f"\\boxed{{{a * b}}}") for a in range(2, 10) for b in range(2, 10)]
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    runs = ExampleRuns(folder)
    overrides = (
        f"data.train={{dataset_name: openai_format, data_path: {folder}/rows.jsonl}}",
        "data.validation=null",
        "sft.max_num_steps=200",
        "sft.max_num_epochs=1000",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "sft.val_at_end=false",
        "policy.optimizer.kwargs.lr=1e-3",
        "checkpointing.save_period=200",
    )
    finished(runs.start, "run_sft.py", "sft_cpu.yaml", overrides, folder)
    yield folder / "checkpoints/step_200/policy/weights/model"
    runs.close()


def taught(start: StartExample, folder: Path, teachers: dict[str, str], *overrides: str) -> Metrics:
    """Return all metrics of a run with a teacher for each task."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "two.yaml"
    config.write_text(OF_TOKENS)
    chosen = ", ".join(f"{name}: {path}" for name, path in teachers.items())
    keys = (f"on_policy_distillation.teacher_model_by_agent_name={{{chosen}}}", *overrides)
    run = start(
        "run_grpo.py", str(config), *keys, f"checkpointing.checkpoint_dir={folder}/checkpoints", logs=folder.name
    )
    assert run.finish(600) == 0, run.log()[-3000:]
    return read_metrics(run.log_dir)


def test_a_student_learns_each_task_from_its_teacher(product_teacher, start_example: StartExample, tmp_path) -> None:
    """Distillation over the vocabulary: sampled tokens alone rarely contain the product of two digits at first."""
    shutil.copy(Path(__file__).with_name("small_products.py"), tmp_path)
    config = tmp_path / "two.yaml"
    config.write_text(over_vocabulary(product_teacher))
    folder = f"checkpointing.checkpoint_dir={tmp_path}/checkpoints"
    run = start_example("run_distillation.py", str(config), folder)
    assert run.finish(900) == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    accuracy = {
        (step, task): metrics["validation", step, f"{task}_test/accuracy"]
        for step in (0, STEPS)
        for task in ("sums", "products")
    }
    assert accuracy[0, "products"] < 0.1, accuracy
    assert accuracy[STEPS, "products"] > 0.6, accuracy
    assert accuracy[STEPS, "sums"] > accuracy[0, "sums"] + 0.4, accuracy
    assert metrics["train", STEPS, f"teachers.{PRODUCTS}/num_rows"] > 0


def test_the_weight_of_a_teacher_scales_its_advantages(product_teacher, start_example: StartExample, tmp_path) -> None:
    """With weights 2 and 2, the advantages of the first step are twice those with weights 1 and 1."""
    shutil.copy(Path(__file__).with_name("small_products.py"), tmp_path)
    both = {"math": str(REPOSITORY / "examples/assets/tiny-teacher"), PRODUCTS: str(product_teacher)}
    once = taught(start_example, tmp_path / "once", both)
    weights = f"on_policy_distillation.teacher_weights={{math: 2.0, {PRODUCTS}: 2.0}}"
    twice = taught(start_example, tmp_path / "twice", both, weights)
    for name in ("advantages/max", "advantages/min"):
        assert twice["train", 1, name] == pytest.approx(2 * once["train", 1, name], rel=1e-5)
    assert twice["train", 1, "teachers.math/reverse_kl"] == once["train", 1, "teachers.math/reverse_kl"]
