"""Tiny Hugging Face models of every family with random values; special features of each family are on."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from nemo_rl.models.huggingface.recurrent import use_configured_time_steps

VOCAB = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
_DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_GLM = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_FLASH = {key: value for key, value in _DEEPSEEK.items() if "group" not in key and key != "first_k_dense_replace"}
_KIMI_ROPE = _YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 8,
    "chunk_size": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    # With 1e-6, the norm after the rule enlarges the rounding of small values, and float32 exceeds 1e-5.
    "rms_norm_eps": 1e-3,
}
_QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3_rope": ("llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 3}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": _YARN}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe_sparse": ("qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        _DEEPSEEK | {"rope_parameters": _YARN | {"mscale": 0.9, "mscale_all_dim": 0.7}},
    ),
    "kimi_k2": (
        "deepseek_v3",
        _DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "rope_parameters": _KIMI_ROPE},
    ),
    "glm4_moe": ("glm4_moe", _GLM | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_air": ("glm4_moe", _GLM | {"rope_parameters": _YARN | {"partial_rotary_factor": 0.25}}),
    "glm4_moe_lite": ("glm4_moe_lite", _FLASH | {"num_experts_per_tok": 3, "rms_norm_eps": 1e-3}),
    "minimax_m2": (
        "minimax_m2", {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3}
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h_dense": ("nemotron_h", _NEMOTRON),
    "qwen3_next": ("qwen3_next", _DELTA | _QWEN_EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3_next_dense": ("qwen3_next", _DELTA | {"num_experts": 0, "tie_word_embeddings": True}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA | {"linear_num_value_heads": 12}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _DELTA | _QWEN_EXPERTS | {"linear_num_value_heads": 4}),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 3, "head_dim": 32, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
         "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        }},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"sliding_window": 3, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.05,
         "rope_parameters": _YARN | {"truncate": False}},
    ),
}  # fmt: skip
"""Name to model type and what differs from `_COMMON`; the first of a type has the type's name."""
_WINDOWED = ["sliding_attention", "full_attention"]
_HALF_LINEAR = ("layer_types", ["linear_attention", "full_attention"])
_KINDS = {
    "gemma3_text": ("layer_types", _WINDOWED),
    "gpt_oss": ("layer_types", _WINDOWED),
    **dict.fromkeys(("qwen3_next", "qwen3_next_dense", "qwen3_5_text", "qwen3_5_moe_text"), _HALF_LINEAR),
    "nemotron_h": ("layers_block_type", ["linear_attention", "moe", "full_attention", "mlp"]),
    "nemotron_h_dense": ("layers_block_type", ["linear_attention", "mlp", "full_attention"]),
}
"""Field with the kinds of layers, and kinds that alternate."""


def hf_config(name: str, **values: Any) -> PretrainedConfig:
    """Return the configuration of one of `MODELS`, with other values."""
    model_type, own = MODELS[name]
    fields = _COMMON | own | values
    if name in _KINDS:
        field, kinds = _KINDS[name]
        fields = {field: (kinds * fields["num_hidden_layers"])[: fields["num_hidden_layers"]]} | fields
    return AutoConfig.for_model(model_type, **fields)


def hf_model(
    name: str, seed: int = 1, *, scores: bool = False, dtype: torch.dtype = torch.float32, **values: Any
) -> Any:
    """Make a random model with eager attention; norms, biases, sinks and buffers are random as well.

    Args:
        name: one of `MODELS`.
        seed: of its values.
        scores: a sequence classifier with one label.
        dtype: of its parameters.
        **values: of the configuration.
    """
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    values |= {"num_labels": 1, "tie_word_embeddings": False} if scores else {}
    made = kind.from_config(hf_config(name, **values), dtype=dtype, attn_implementation="eager")
    use_configured_time_steps(made)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=gen)
            # Norms of Gemma and Qwen3-Next multiply by 1 + weight. Around 2 they make attention so sharp that rounding
            # alone, also in transformers' own float32, exceeds 1e-5.
            centre = 0.0 if _is_centred_at_zero(made.config.model_type, key) else 1.0
            parameter.copy_(0.1 * noise + centre if parameter.dim() == 1 else 0.1 * noise)
        for key, parameter in made.named_parameters():
            if key.endswith(("A_log", "dt_bias")):  # states last for about 20 tokens
                parameter.sub_(2.0 if "dt" in key else 3.0)
        for key, buffer in made.named_buffers():
            if "e_score_correction_bias" in key:
                # Float32 as in the hub's files, whatever the format of the weights.
                buffer.data = 0.1 * torch.randn(buffer.shape, generator=gen)
    return made.eval()


def _is_centred_at_zero(model_type: str, key: str) -> bool:
    """Return whether a parameter is the weight of a norm that multiplies by 1 + weight."""
    if model_type.startswith("qwen3_"):
        return model_type != "qwen3_moe" and key.endswith("norm.weight") and "linear_attn" not in key
    return model_type == "gemma3_text"


@contextmanager
def saved(model: Any) -> Iterator[Path]:
    """Save the model's files in a folder for the duration of the context."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)
