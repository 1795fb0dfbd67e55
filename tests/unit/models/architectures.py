"""Make tiny random models of many architectures, with the special features of each switched on."""

from typing import Any

import torch
from policy_helpers import COMMON
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    **COMMON,
    "tie_word_embeddings": False,
}
_WINDOW = {"sliding_window": 5}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
_GEMMA = _HYBRID | {"query_pre_attn_scalar": 16, "initializer_range": 0.1}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}

SPECIAL: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "mistral": _WINDOW,
    "phi3": _WINDOW,
    "qwen2_moe": _EXPERTS
    | {"shared_expert_intermediate_size": 48, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
    "qwen3_moe": _EXPERTS | {"head_dim": 16},
    "mixtral": _LOCAL_EXPERTS | _WINDOW,
    "phimoe": _LOCAL_EXPERTS | _WINDOW,
    "deepseek_v3": _MLA
    | _GROUPED
    | {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 1.0},
    "gemma3_text": _GEMMA,
    "gpt_oss": _HYBRID | _LOCAL_EXPERTS,
    "llama4_text": _LOCAL_EXPERTS | {"attention_chunk_size": 5, "head_dim": 16, "intermediate_size_mlp": 96},
    "cohere2": _HYBRID,
    "olmo3": _HYBRID,
    "starcoder2": _WINDOW,
    "exaone4": _HYBRID | {"sliding_window_pattern": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ministral": _HYBRID,
    "minimax": _LOCAL_EXPERTS | _LINEAR,
    "gptj": {"n_layer": 2, "n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
}


PACKS = (
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "ministral", "mixtral", "phi", "phi3", "phimoe"),
    *("deepseek_v3", "gemma3_text", "gpt_neox", "gpt2", "cohere2", "olmo2", "olmo3", "starcoder2", "exaone4"),
    *("smollm3", "glm4", "granite", "gemma2", "gpt_oss"),
)
"""Architectures in which packed rows give the results of padded ones."""
REFUSED_AT_LOAD = {
    "falcon": "FalconForCausalLM computes its attention in its own code",
    "gptj": "GPTJForCausalLM computes its attention in its own code",
    "gpt_neo": "GPTNeoForCausalLM computes its attention in its own code",
    "mpt": "MptForCausalLM computes its attention in its own code",
    "bloom": "BloomForCausalLM computes its attention in its own code",
}
"""Architectures without a replaceable attention -> the error."""
REFUSED_BY_PROBE = {
    "llama4_text": "Llama4ForCausalLM uses chunked attention",
    "doge": "DogeAttention passes a mask of its own",
    "minimax": "MiniMaxForCausalLM: outputs for packed sequences differ .* padded",
    "stablelm": "StableLmForCausalLM: outputs for packed sequences differ .* padded",
}
"""Architectures in which packed rows would differ from padded ones -> the error."""
WAY_OUT = r"policy\.sequence_packing\.enabled=false"


def random_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """Make a model in float32 and eval mode.

    Args:
        model_type: name of the architecture in transformers.
        **overrides: fields of its configuration.
    """
    config = AutoConfig.for_model(model_type, **_COMMON | SPECIAL.get(model_type, {}) | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
