"""Named variants of families: options of published models that change which code a model runs.

A variant is a set of fields of a configuration, on top of the usual small sizes of its type (`every_type`). Invariant:
every field exists in the type's configuration, and a model that is built has the values given here.
"""

from collections.abc import Mapping
from typing import Any

type Fields = Mapping[str, Any]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ONE_KEY_HEAD: Fields = {"num_key_value_heads": 1}
_AS_MANY_KEYS: Fields = {"num_key_value_heads": 4}
_ODD: Fields = {"vocab_size": 251, "num_hidden_layers": 3, "tie_word_embeddings": True}
_ODD_WIDTH: Fields = {"intermediate_size": 95}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SHORT, _LONG = [1.0 + 0.05 * place for place in range(8)], [1.5 + 0.5 * place for place in range(8)]


def _long_rope(original: int, share: float = 1.0) -> dict[str, Any]:
    pairs = round(8 * share)
    return {
        **_DEFAULT_ROPE,
        "rope_type": "longrope",
        "partial_rotary_factor": share,
        "short_factor": _SHORT[:pairs],
        "long_factor": _LONG[:pairs],
        "original_max_position_embeddings": original,
    }


_GEMMA_2: Mapping[str, Fields] = {
    "windows only, no caps": {
        "layer_types": [_SLIDING] * 4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "no windows, biases, own scale": {
        "layer_types": [_FULL] * 4,
        "attention_bias": True,
        "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 1.0,
    },
    "one key head, wide heads, tied": {**_ONE_KEY_HEAD, "head_dim": 24, "tie_word_embeddings": True},
    "odd sizes": {**_ODD, **_ODD_WIDTH, "layer_types": [_SLIDING, _SLIDING, _FULL]},
    "bidirectional": {"use_bidirectional_attention": True},
}

FAMILIES: Mapping[str, Mapping[str, Fields]] = {
    "bamba": {
        "Mamba only": {"attn_layer_indices": []},
        "attention only": {"attn_layer_indices": [0, 1, 2, 3]},
        "two groups, biases": {
            "attn_layer_indices": [1, 2],
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "one key head, bounded steps, tied": {
            **_ONE_KEY_HEAD,
            "attn_layer_indices": [2],
            "time_step_limit": [0.01, 0.5],
            "tie_word_embeddings": True,
        },
        "odd sizes": {**_ODD, **_ODD_WIDTH, "attn_layer_indices": [1]},
    },
    "deepseek_v3": {
        "whole queries, no dense layers": {"q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
        "groups, two shared experts, YaRN": {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
        "dense only, biases": {"first_k_dense_replace": 4, "attention_bias": True, "num_key_value_heads": 4},
        "rotation in halves, own value size": {"rope_interleave": False, "v_head_dim": 10, "qk_nope_head_dim": 12},
        "odd dense width": _ODD_WIDTH,
        "odd experts": {"moe_intermediate_size": 47, "n_shared_experts": 1, "tie_word_embeddings": True},
    },
    "ernie4_5_moe": {
        "biases, every second layer": {"use_bias": True, "moe_layer_interval": 2, "moe_layer_start_index": 0},
        "dense last layer, no shared experts": {
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 0,
        },
        "one expert for a token, one key head, tied": {**_ONE_KEY_HEAD, "moe_k": 1, "tie_word_embeddings": True},
        "odd dense width": _ODD_WIDTH,
        "odd shared experts": {"moe_intermediate_size": 47},
        "three experts": {"moe_num_experts": 3, "num_hidden_layers": 3},
    },
    "falcon_h1": {
        "five layers, factors": {
            "num_hidden_layers": 5,
            "ssm_multipliers": [0.5, 1.2, 0.8, 1.1, 0.9],
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.6,
        },
        "two layers": {"num_hidden_layers": 2},
        "gated norm after, two groups, biases": {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "norm before the gate, one group": {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_n_groups": 1,
            "ssm_multipliers": [0.5, 1.2, 0.8, 1.1, 0.9],
        },
        "one key head, wide heads, tied": {**_ONE_KEY_HEAD, "tie_word_embeddings": True, "rope_parameters": _YARN},
        "odd sizes": {**_ODD, **_ODD_WIDTH},
    },
    "gemma2": _GEMMA_2,
    "gemma3_text": {
        **_GEMMA_2,
        "frequencies by layer": {
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                _SLIDING: _DEFAULT_ROPE,
            }
        },
    },
    "hy_v3": {
        "experts only, one shared": {"mlp_layer_types": ["sparse"] * 4, "num_shared_experts": 1},
        "dense only, biases": {"mlp_layer_types": ["dense"] * 4, "attention_bias": True, "mlp_bias": True},
        "two shared experts, narrow sums, one key head": {
            **_ONE_KEY_HEAD,
            "num_shared_experts": 2,
            "enable_moe_fp32_combine": False,
        },
        "odd dense width": _ODD_WIDTH,
        "odd experts": {"moe_intermediate_size": 47},
        "wide heads, one expert for a token, tied": {
            "head_dim": 24,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
    },
    "jamba": {
        "Mamba only, dense": {"attn_layer_period": 8, "attn_layer_offset": 7, "num_experts": 1},
        "attention only": {"attn_layer_period": 1, "attn_layer_offset": 0},
        "experts in all layers, biases": {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
        "one key head, tied": {**_ONE_KEY_HEAD, "tie_word_embeddings": True, "mamba_dt_rank": 3},
        "odd sizes": {**_ODD, **_ODD_WIDTH},
    },
    "lfm2_moe": {
        "convolutions only, biases": {"layer_types": ["conv"] * 4, "conv_bias": True},
        "attention only, no dense layers": {"layer_types": [_FULL] * 4, "num_dense_layers": 0},
        "dense only": {"num_dense_layers": 4},
        "plain router, one key head, tied": {
            **_ONE_KEY_HEAD,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
        },
        "odd dense width": _ODD_WIDTH,
    },
    "mimo_v2_flash": {
        "no windows": {"layer_types": [_FULL] * 4, "attention_value_scale": None},
        "windows only, biases": {"layer_types": [_SLIDING] * 4, "attention_bias": True},
        "groups, plain weights": {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        "experts only, own value size, one key head": {
            **_ONE_KEY_HEAD,
            "mlp_layer_types": ["sparse"] * 4,
            "v_head_dim": 10,
        },
        "odd dense width": _ODD_WIDTH,
    },
    "minimax_m3_vl_text": {
        "no sparse attention": {"layer_types": [_FULL] * 4},
        "dense layers": {"mlp_layer_types": ["dense", "sparse"] * 2, "layer_types": [_FULL] * 4},
        "one key head, two local blocks": {**_ONE_KEY_HEAD, "index_local_blocks": 2, "index_n_heads": 1},
        "odd dense width": {
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "layer_types": [_FULL] * 4,
            "dense_intermediate_size": 95,
        },
        "odd shared expert": {"layer_types": [_FULL] * 4, "shared_intermediate_size": 47},
    },
    "mistral": {
        "no window, wide heads": {"sliding_window": None, "head_dim": 24},
        "one key head, tied": {**_ONE_KEY_HEAD, "tie_word_embeddings": True},
        "YaRN, as many keys": {**_AS_MANY_KEYS, "rope_parameters": _YARN},
        "Llama 3's frequencies": {"rope_parameters": _LLAMA_3, "sliding_window": None},
        "dynamic frequencies": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 32,
        },
        "odd sizes": {**_ODD, **_ODD_WIDTH},
    },
    "olmo_hybrid": {
        "positive eigenvalues, biases": {"linear_allow_neg_eigval": False, "attention_bias": True},
        "rotation, one key head": {**_ONE_KEY_HEAD, "rope_parameters": _DEFAULT_ROPE},
        "attention first, own sizes, tied": {
            "layer_types": [_FULL, _FULL, _LINEAR, _FULL],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "tie_word_embeddings": True,
        },
        "odd sizes": {**_ODD, **_ODD_WIDTH, "layer_types": [_LINEAR, _LINEAR, _FULL]},
    },
    "phi3": {
        "long-rope, long factors": {"rope_parameters": _long_rope(16)},
        "long-rope, short factors, partial": {"rope_parameters": _long_rope(128, 0.5), "sliding_window": None},
        "one key head, tied": {**_ONE_KEY_HEAD, "tie_word_embeddings": True},
        "as many keys, no window": {**_AS_MANY_KEYS, "sliding_window": None},
        "odd sizes": {**_ODD, **_ODD_WIDTH},
    },
    "qwen4_exp_text": {
        "indexed attention only": {"layer_types": ["indexed_attention"] * 4},
        "linear attention only": {"layer_types": [_LINEAR] * 4},
        "sigmoid gates, plain weights": {"output_gate_type": "sigmoid", "norm_topk_prob": False},
        "two streams, one key head": {**_ONE_KEY_HEAD, "hc_count": 2},
    },
    "zaya": {
        "no windows": {"layer_types": ["hybrid"] * 4, "sliding_window": None},
        "biases, longer convolutions": {
            "attention_bias": True,
            "lm_head_bias": True,
            "cca_time0": 3,
            "cca_time1": 4,
        },
        "tied, as many keys": {**_AS_MANY_KEYS, "tie_word_embeddings": True},
        "one key head": _ONE_KEY_HEAD,
    },
}
"""Fields by type and name of the variant."""


def fields_of(model_type: str, name: str) -> Fields:
    """Return the fields of a variant.

    Raises:
        ValueError: the type has no such variant; lists those that it has.
    """
    known = FAMILIES.get(model_type, {})
    if name not in known:
        raise ValueError(f"{model_type} has no variant {name!r}, but {', '.join(map(repr, known)) or 'none'}")
    return known[name]
