"""Make tiny random models of each architecture with its special features switched on.

Invariant: every size divides by 4, and every parameter affects the output: weights are large, and norms and biases
differ from their initial values.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_WINDOW = {"sliding_window": 7}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "head_dim": 16}
_GEMMA = _HYBRID | {"query_pre_attn_scalar": 16, "initializer_range": 0.1}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", _GEMMA | {"tie_word_embeddings": True}),
    "mistral": ("mistral", _WINDOW),
    "phi3": ("phi3", _WINDOW),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {"head_dim": 16}),
    "deepseek-v3": (
        "deepseek_v3",
        _MLA | _GROUPED | {"num_key_value_heads": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    ),
    "gpt-oss": ("gpt_oss", _HYBRID | {"num_local_experts": 8, "num_experts_per_tok": 2}),
}
"""Row of the table -> `model_type` and special fields."""


ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
"""Fields that send each token to all experts of a mixture, so that rounding cannot change the choice of experts."""


def random_model(architecture: str, *, all_experts: bool = False) -> PreTrainedModel:
    """Make a model of the table, in float32 and eval mode, with the same weights in every process.

    Args:
        architecture: key of `ARCHITECTURES`.
        all_experts: send each token to all experts of a mixture.
    """
    model_type, special = ARCHITECTURES[architecture]
    if all_experts:
        special = special | {name: value for name, value in ALL_EXPERTS.items() if name in special}
    config = AutoConfig.for_model(model_type, **_COMMON | special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.normal_()
                elif parameter.dim() == 1 or name.endswith("_bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_model(architecture: str, folder: Path, *, all_experts: bool = False) -> str:
    """Write a `random_model` to a folder; return the folder's name."""
    random_model(architecture, all_experts=all_experts).save_pretrained(folder)
    return str(folder)
