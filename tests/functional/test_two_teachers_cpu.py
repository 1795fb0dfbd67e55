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
STEPS = 60
CONFIG = f"""
defaults: {REPOSITORY}/examples/configs/grpo_opd_cpu.yaml
grpo:
  max_num_steps: {STEPS}
  val_period: {STEPS // 3}
policy:
  optimizer: {{kwargs: {{lr: 5.0e-4}}}}
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
    config.write_text(CONFIG)
    chosen = ", ".join(f"{name}: {path}" for name, path in teachers.items())
    keys = (f"on_policy_distillation.teacher_model_by_agent_name={{{chosen}}}", *overrides)
    run = start(
        "run_grpo.py", str(config), *keys, f"checkpointing.checkpoint_dir={folder}/checkpoints", logs=folder.name
    )
    assert run.finish(600) == 0, run.log()[-3000:]
    return read_metrics(run.log_dir)


def test_a_student_learns_each_task_from_its_teacher(product_teacher, start_example: StartExample, tmp_path) -> None:
    shutil.copy(Path(__file__).with_name("small_products.py"), tmp_path)
    sums = str(REPOSITORY / "examples/assets/tiny-teacher")
    both = {"math": sums, PRODUCTS: str(product_teacher)}
    of_both = taught(start_example, tmp_path / "both", both)
    of_one = taught(
        start_example, tmp_path / "one", {"math": sums}, "on_policy_distillation.default_teacher_alias=math"
    )
    found = {
        (name, task): metrics["validation", STEPS, f"{task}_test/accuracy"]
        for name, metrics in {"both": of_both, "one": of_one}.items()
        for task in ("sums", "products")
    }
    assert found["both", "products"] > 0.5, found
    assert found["one", "products"] < 0.1, found
    assert found["both", "sums"] > of_both["validation", 0, "sums_test/accuracy"] + 0.1, found
    for teacher in ("math", PRODUCTS):
        assert of_both["train", STEPS, f"teachers.{teacher}/num_rows"] > 0


def test_the_weight_of_a_teacher_scales_its_advantages(product_teacher, start_example: StartExample, tmp_path) -> None:
    """With weights 2 and 2, the advantages of the first step are twice those with weights 1 and 1."""
    shutil.copy(Path(__file__).with_name("small_products.py"), tmp_path)
    both = {"math": str(REPOSITORY / "examples/assets/tiny-teacher"), PRODUCTS: str(product_teacher)}
    short = ("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_start=false")
    once = taught(start_example, tmp_path / "once", both, *short)
    weights = f"on_policy_distillation.teacher_weights={{math: 2.0, {PRODUCTS}: 2.0}}"
    twice = taught(start_example, tmp_path / "twice", both, *short, weights)
    for name in ("advantages/max", "advantages/min"):
        assert twice["train", 1, name] == pytest.approx(2 * once["train", 1, name], rel=1e-5)
    assert twice["train", 1, "teachers.math/reverse_kl"] == once["train", 1, "teachers.math/reverse_kl"]
