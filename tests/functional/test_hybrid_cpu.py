"""GRPO with tiny models that have recurrent layers, end to end on the CPU, in packed rows: it learns."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import StartExample, of_training, read_metrics
from tiny_models import make_char_tokenizer, save_tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

STEPS = 24
OVERRIDES = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "policy.generation.max_new_tokens=24",
    "data.default.env_name=reward",
    "env={reward: {function: digit_reward.share_of_digits}}",
)
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
NEMOTRON_EXPERTS = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("nemotron_h", MAMBA | {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}),
    "experts": ("nemotron_h", MAMBA | NEMOTRON_EXPERTS | {"layers_block_type": ["mamba", "attention", "mamba", "moe"]}),
    "delta": ("qwen3_next", DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64}),
}


def save_hybrid(folder: Path, name: str) -> None:
    """Save a random model of four layers."""
    tokenizer = make_char_tokenizer()
    model_type, fields = MODELS[name]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
        **fields,
    )
    torch.manual_seed(0)
    save_tiny_checkpoint(folder, AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer)


DTENSOR = ("grpo_math_cpu.yaml", "policy.optimizer.kwargs.lr=3e-3")
MEGATRON = (
    "grpo_math_cpu_megatron.yaml",
    "policy.megatron_cfg.optimizer.lr=3e-3",
    "policy.megatron_cfg.optimizer.min_lr=3e-3",
)


@pytest.mark.parametrize(
    ("name", "precision", "largest_error", "backend"),
    [
        pytest.param("dense", "float32", 1.001, DTENSOR, id="dense-float32-1.001"),
        pytest.param("experts", "float32", 1.001, DTENSOR, id="experts-float32-1.001"),
        pytest.param("delta", "bfloat16", 1.06, DTENSOR, id="delta-bfloat16-1.06"),
        pytest.param("delta", "bfloat16", 1.06, MEGATRON, id="delta-megatron"),
    ],
)
def test_a_random_model_learns_to_write_digits(
    start_example: StartExample,
    tmp_path: Path,
    name: str,
    precision: str,
    largest_error: float,
    backend: tuple[str, ...],
) -> None:
    save_hybrid(tmp_path / "model", name)
    shutil.copy(Path(__file__).with_name("digit_reward.py"), tmp_path)
    model = (f"policy.model_name={tmp_path / 'model'}", f"policy.precision={precision}")
    run = start_example("run_grpo.py", *backend, *model, *OVERRIDES)
    assert run.finish(540) == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    rewards = [metrics["train", step, "reward"] for step in range(1, STEPS + 1)]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.4, rewards
    errors = [metrics["train", step, "token_mult_prob_error"] for step in range(1, STEPS + 1)]
    assert max(errors) < largest_error, errors
