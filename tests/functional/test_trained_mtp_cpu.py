"""GRPO of a tiny DeepSeek-V3 that trains its layer for multi-token prediction, end to end on the CPU."""

import importlib.util
from pathlib import Path

import pytest
import torch
from example_runs import StartExample, read_metrics
from mtp_models import WithMTP
from tiny_models import make_char_tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

STEPS = 5
COMMON = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.optimizer.lr=3.0e-3",
    "policy.megatron_cfg.optimizer.min_lr=3.0e-3",
    "policy.megatron_cfg.mtp_num_layers=1",
    "policy.megatron_cfg.mtp_loss_scaling_factor=1.0",
    "+policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 1}",
)
TWO_RANKS = ("cluster.ranks_per_node=2", "policy.generation.engine.tensor_parallel_size=2")
STAGES = (*TWO_RANKS, "policy.megatron_cfg.pipeline_model_parallel_size=2")
DETACHED = (
    *TWO_RANKS,
    "policy.megatron_cfg.mtp_detach_heads=true",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.sequence_parallel=true",
)


def save_model(folder: Path) -> None:
    """Save the model with a tokenizer; latent attention is of the only kind that vLLM's CPU build has."""
    tokenizer = make_char_tokenizer()
    config = DeepseekV3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=48,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.15,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    torch.manual_seed(0)
    WithMTP(DeepseekV3ForCausalLM(config).float()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("more", [(), STAGES, DETACHED], ids=["one rank", "stages", "detached"])
def test_the_layer_learns_and_the_engine_proposes_with_it(
    start_example: StartExample, tmp_path: Path, more: tuple[str, ...]
) -> None:
    save_model(tmp_path / "model")
    names = (f"policy.model_name={tmp_path / 'model'}", f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}")
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *names, *COMMON, *more)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    losses = [metrics["train", step, "mtp_loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0] - 0.1, losses
    assert all(metrics["train", step, "token_mult_prob_error"] < 1.01 for step in range(1, STEPS + 1))
    assert all(metrics["generation", step, "spec_proposed_tokens"] > 0 for step in range(1, STEPS + 1))
