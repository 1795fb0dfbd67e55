"""Runs with each kind of teacher, and reward models of each type, repeat their metrics after a kill, on the CPU."""

import shutil
from pathlib import Path

import pytest
from example_runs import REPOSITORY, Metrics, StartExample, killed_and_resumed
from make_tiny_pair_model import make_pair_model
from vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.long]

STEPS = 8
ASSETS = REPOSITORY / "examples/assets"
OPD, DISTILLATION = ("run_grpo.py", "grpo_opd_cpu.yaml"), ("run_distillation.py", "distillation_math_cpu.yaml")
LORA = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 8, alpha: 16}"


def short(section: str) -> tuple[str, ...]:
    """Return overrides of a run with two checkpoints and without validation."""
    return (
        *(f"{section}.max_num_steps={STEPS}", f"checkpointing.save_period={STEPS // 2}", f"{section}.val_period=0"),
        *(f"{section}.val_at_start=false", f"{section}.val_at_end=false", "logger.tensorboard_enabled=false"),
    )


def sampled(section: str, *overrides: str) -> tuple[str, ...]:
    """Return overrides of a short run with 16 samples a step and the engine that starts the fastest."""
    return (
        *short(section),
        *(f"{section}.num_prompts_per_step=4", f"{section}.num_generations_per_prompt=4"),
        *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16", "policy.generation.backend=hf"),
        *overrides,
    )


SELF = "on_policy_distillation.self_distillation"
OF_ITSELF = ("~on_policy_distillation.teacher_model_by_agent_name", f"{SELF}.enabled=true")
AHEAD, DISTILLATION_AHEAD = "grpo.overlap.mode=ahead", "distillation.overlap.mode=ahead"
OF_TOKENS = {
    "one teacher, ahead, with rewards": (AHEAD, "grpo.adv_estimator.reward_advantages=grpo"),
    "hint, ahead, LoRA": (*OF_ITSELF, f"{SELF}.context='It is {{ground_truth}}.'", AHEAD, LORA),
    "solutions, initial weights": (*OF_ITSELF, f"{SELF}.context='See: {{solution}}'", f"{SELF}.weights=initial"),
}
OF_VOCABULARY = {
    "whole vocabulary, ahead, LoRA": (
        *("distillation.topk_logits_k=264", "loss_fn.kl_type=jensen_shannon", DISTILLATION_AHEAD, LORA),
    ),
    "gold, ahead": ("loss_fn.gold_loss=true", DISTILLATION_AHEAD),
    "xtoken, LoRA, weights of tokens": (
        *("loss_fn.xtoken_loss=true", LORA, "teacher.token_weights.name=thinking", "teacher.token_weights.answer=0.5"),
    ),
}


def check_teacher_reaches_the_policy(metrics: Metrics) -> None:
    assert all(metrics["train", step, "grad_norm"] > 0 for step in range(1, STEPS + 1))


@pytest.mark.parametrize("form", OF_TOKENS)
def test_advantages_of_a_teacher(form: str, start_example: StartExample, tmp_path: Path) -> None:
    metrics = killed_and_resumed(start_example, *OPD, sampled("grpo", *OF_TOKENS[form]), tmp_path, STEPS)
    check_teacher_reaches_the_policy(metrics)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a token for each two digits."""
    folder = tmp_path_factory.mktemp("pairs") / "model"
    make_pair_model(folder)
    return folder


@pytest.mark.parametrize("form", OF_VOCABULARY)
def test_logits_of_a_teacher(form: str, pairs: Path, start_example: StartExample, tmp_path: Path) -> None:
    teacher = () if "whole vocabulary" in form else (f"teacher.model_name={pairs}",)
    overrides = sampled("distillation", *teacher, *OF_VOCABULARY[form])
    check_teacher_reaches_the_policy(killed_and_resumed(start_example, *DISTILLATION, overrides, tmp_path, STEPS))


def test_written_texts_with_a_teacher(pairs: Path, start_example: StartExample, tmp_path: Path) -> None:
    """SFT whose teacher has other tokens, with LoRA."""
    teacher = (f"+teacher.model_name={pairs}", "+teacher_loss_fn.xtoken_loss=true", "+teacher_loss_fn.vocab_topk=32")
    small = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16", LORA)
    overrides = (*short("sft"), *small, *teacher, "data.validation=null")
    metrics = killed_and_resumed(start_example, "run_sft.py", "sft_cpu.yaml", overrides, tmp_path, STEPS)
    check_teacher_reaches_the_policy(metrics)
    assert all(metrics["train", step, "matched_mass"] > 0 for step in range(1, STEPS + 1))


def test_advantages_of_a_teacher_with_other_tokens(pairs: Path, start_example: StartExample, tmp_path: Path) -> None:
    teacher = f"on_policy_distillation.teacher_model_by_agent_name={{math: {pairs}}}"
    overrides = sampled("grpo", teacher, "on_policy_distillation.compares=text", AHEAD)
    check_teacher_reaches_the_policy(killed_and_resumed(start_example, *OPD, overrides, tmp_path, STEPS))


TWO = f"""
defaults: {REPOSITORY}/examples/configs/grpo_opd_cpu.yaml
data:
  train:
    - {{name: sums, weight: 1, dataset_name: arithmetic, num_samples: 4000, seed: 1}}
    - {{name: products, weight: 1, dataset_name: arithmetic_products, split: train, num_samples: 64,
       env_name: small_products.Products, min_operand: 2, max_operand: 9}}
env:
  small_products.Products: {{}}
on_policy_distillation:
  teacher_model_by_agent_name:
    math: {ASSETS}/tiny-teacher
    small_products.Products: {ASSETS}/tiny-chat
"""


def test_two_teachers_ahead_with_adapters(start_example: StartExample, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("small_products.py"), tmp_path)
    (tmp_path / "two.yaml").write_text(TWO)
    overrides = sampled("grpo", AHEAD, LORA)
    metrics = killed_and_resumed(start_example, OPD[0], str(tmp_path / "two.yaml"), overrides, tmp_path, STEPS)
    for teacher in ("math", "small_products.Products"):
        assert sum(metrics["train", step, f"teachers.{teacher}/num_rows"] for step in range(1, STEPS + 1)) > 0


@pytest.mark.vllm
def test_a_teacher_at_an_endpoint(start_example: StartExample, tmp_path: Path) -> None:
    """One request at a time, because the server's batches depend on the times of its requests."""
    with vllm_server(tmp_path, "examples/assets/tiny-teacher") as address:
        teacher = f"{{base_url: '{address}', model: tiny, max_concurrent_requests: 1}}"
        endpoint = (
            "~on_policy_distillation.teacher_model_by_agent_name",
            f"on_policy_distillation.endpoints.math={teacher}",
        )
        overrides = sampled("grpo", *endpoint, AHEAD, LORA)
        metrics = killed_and_resumed(start_example, *OPD, overrides, tmp_path, STEPS)
    check_teacher_reaches_the_policy(metrics)


@pytest.mark.parametrize(("kind", "adapters"), [("regression", (LORA,)), ("process", ())])
def test_reward_models(kind: str, adapters: tuple[str, ...], start_example: StartExample, tmp_path: Path) -> None:
    small = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16")
    overrides = (*short("rm"), *small, *adapters)
    killed_and_resumed(start_example, "run_rm.py", f"rm_{kind}_cpu.yaml", overrides, tmp_path, STEPS)
