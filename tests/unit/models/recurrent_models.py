"""Make tiny random models with recurrent layers: Mamba, gated delta nets, short convolutions."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from nemo_rl.models.huggingface.probe_model import filled, without_memory

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 5}
_ZAMBA = {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32, "mamba_d_state": 16}
_KDA = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 16},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2, "chunk_size": 16},
    "falcon_mamba": {"state_size": 16},
    "jamba": _EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8},
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1, 3]},
    "zamba": _ZAMBA | {"n_mamba_heads": 2, "mamba_dt_rank": 8},
    "zamba2": _ZAMBA
    | {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 16}
    | {"num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]},
    "nemotron_h": _EXPERTS
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}
    | {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32},
    "granitemoehybrid": _EXPERTS
    | _MAMBA_2
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "falcon_h1": _MAMBA_2,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _EXPERTS | _CONVOLUTION | {"num_dense_layers": 1},
    "qwen3_next": _EXPERTS | _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _EXPERTS | _DELTA,
    "olmo_hybrid": _DELTA | {"linear_conv_kernel_dim": 4},
    "kimi_linear": _EXPERTS
    | {"linear_attn_config": _KDA, "num_key_value_heads": 4, "num_experts_per_token": 2, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
"""Architectures whose packed rows equal rows alone -> fields of the configuration."""

WITHOUT_CORES: dict[str, dict[str, Any]] = {
    "minimax": _EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "zaya": _EXPERTS | {"num_experts_per_tok": 1},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 64,
        "attention_window_size": 8,
    },
    "rwkv": {"attention_hidden_size": 64},
}
"""Recurrent architectures whose packed rows are refused -> fields of the configuration."""


def recurrent_model(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """Make a model in eval mode, with weights that make every operation matter."""
    known = RECURRENT | WITHOUT_CORES
    config = AutoConfig.for_model(model_type, **_COMMON | known[model_type] | fields)
    kind = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    return filled(without_memory(kind, config)).to(dtype)
