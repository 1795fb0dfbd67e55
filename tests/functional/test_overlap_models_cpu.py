"""Models with experts, and with sliding windows in all layers or in some, are trained while answers are sampled."""

import shutil
from pathlib import Path

import pytest
import torch
from example_runs import REPOSITORY, StartExample, of_training, read_metrics
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

TOKENIZER = REPOSITORY / "examples/assets/tiny-chat"
SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}
ENVIRONMENT = """
import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class Vowels(EnvironmentInterface):
    def __init__(self, cfg):
        pass

    def step(self, message_logs, metadata):
        count = [sum(map(log[-1]["content"].count, "aeiou")) for log in message_logs]
        done = [{"role": "environment", "content": ""}] * len(count)
        ended = torch.ones(len(count), dtype=torch.bool)
        return EnvironmentReturn(done, metadata, [None] * len(count), torch.tensor(count).float(), ended)
"""
AHEAD = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=ready_first",
    "grpo.overlap.in_flight_weight_updates=true",
    "grpo.overlap.validation=through_updates",
)


def save_model(model_type: str, folder: Path) -> None:
    """Write a random model with the tokenizer of the quick start."""
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(TOKENIZER / "chat_template.jinja", folder)


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODELS)
def test_other_architectures_are_trained_while_answers_are_sampled(
    start_example: StartExample, tmp_path: Path, model_type: str
) -> None:
    save_model(model_type, tmp_path / "model")
    (tmp_path / "vowels.py").write_text(ENVIRONMENT)
    run = start_example(
        "run_grpo.py",
        "grpo_math_cpu.yaml",
        *AHEAD,
        f"policy.model_name={tmp_path}/model",
        "policy.generation.max_new_tokens=24",
        "data.default.env_name=vowels.Vowels",
        "++env={vowels.Vowels: {}}",
        "grpo.num_prompts_per_step=4",
        "policy.train_global_batch_size=32",
        "grpo.max_num_steps=4",
        "grpo.max_val_samples=8",
        "grpo.val_batch_size=8",
        "grpo.val_period=2",
        "checkpointing.enabled=false",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    for step in range(1, 5):
        assert metrics["train", step, "grad_norm"] > 0
        is_measured = not metrics.get(("train", step, "max_trajectory_age"))  # not for tokens of older weights
        assert (("train", step, "token_mult_prob_error") in metrics) is is_measured
        assert not is_measured or metrics["train", step, "token_mult_prob_error"] < 1.01
        if model_type == "qwen3_moe":
            assert 0 < metrics["train", step, "moe/load_entropy"] <= 1
    assert metrics["validation", 4, "num_samples"] == 8
