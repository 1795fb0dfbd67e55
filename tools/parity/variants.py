"""Draw legal but unusual values of configuration fields, so that model types are tried in other forms than usual ones.

Numbers of heads, layers, experts and tokens, sizes of heads, biases, norms of queries and keys, tied embeddings, caps,
windows, rotary scalings and kernels of convolutions are drawn. Invariant: a seed and a model type give the same values
in every process. Two ranks divide the sizes of even seeds (but four do not), and hardly any of odd seeds.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = 16
_FLAGS = (
    *("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "bias", "lm_head_bias"),
    *("attention_qkv_bias", "attention_out_bias", "mamba_conv_bias", "use_conv_bias", "mamba_proj_bias"),
    *("use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm", "use_parallel_residual", "parallel_attn"),
    *("norm_topk_prob", "tie_word_embeddings", "add_swa_attention_sink_bias", "add_full_attention_sink_bias"),
    *("shared_attention_projections", "route_norm", "moe_use_expert_bias", "mamba_norm_before_gate"),
)
_CAPS = ("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MAY_BE_NONE = (*_CAPS, "q_lora_rank")
"""Fields whose drawn value None replaces the default of a configuration."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
_CONVOLUTIONS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", "short_conv_kernel_size")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")


def draw_for(seed: int, model_type: str) -> random.Random:
    """Return the random numbers of a variant."""
    return random.Random(f"{seed} {model_type}")


def sizes(seed: int, model_type: str) -> dict[str, Any]:
    """Return the values of fields by name, of which a configuration takes those that it has."""
    draw = draw_for(seed, model_type)
    even = seed % 2 == 0
    keys = draw.choice((2, 6)) if even else draw.choice((1, 3))
    heads = keys * draw.choice((1, 3) if keys > 1 else (3, 5))
    hidden, experts = heads * _HEAD, 6 if even else 5
    inner, small, shared = (90, 46, 38) if even else (75, 35, 33)
    own = draw.choice((8, 24, 32))
    linear_keys = 2 if even else 3
    return {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "lru_width"), hidden),
        **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size"), hidden),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner"), inner),
        **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size"), inner),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), small),
        **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), shared),
        "shared_intermediate_size": shared,
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"), layers(seed)),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), heads),
        **dict.fromkeys(("swa_num_attention_heads", "linear_num_heads"), heads),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), keys),
        "linear_num_key_heads": linear_keys,
        "linear_num_value_heads": linear_keys * draw.choice((1, 2, 3)),
        **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels"), own),
        "linear_key_head_dim": draw.choice((8, 16)),
        "linear_value_head_dim": draw.choice((12, 20)),
        "linear_head_dim": own,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "q_lora_rank": draw.choice((24, None)),
        "kv_lora_rank": 20,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), draw.choice((2, 3))),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), draw.choice((0, 1, 2))),
        "n_group": 2 if even else 1,
        "topk_group": 1,
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), draw.choice((0, 1, 2))),
        **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), draw.choice((3, 7))),
        **dict.fromkeys(("sliding_window_pattern", "full_attention_interval"), draw.choice((2, 3))),
        **dict.fromkeys(("attn_layer_period", "expert_layer_period", "interleave_moe_layer_step"), draw.choice((2, 3))),
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), _HEAD),
        **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), draw.choice((1, 2))),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), draw.choice((6, 8))),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), draw.choice((4, 8))),
        "mamba_d_ssm": 2 * hidden,
        "vocab_size": 134 if even else 131,
        "vocab_size_per_layer_input": 134 if even else 131,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "query_pre_attn_scalar": draw.choice((11, 16)),
        "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
        "rotary_dim": draw.choice((4, 8)),
        "logit_scale": draw.choice((0.5, 1.0)),
        **{name: draw.choice((3, 4)) for name in _CONVOLUTIONS},
        **{name: draw.random() < 0.5 for name in _FLAGS},
        **{name: draw.choice((None, 5.0)) for name in _CAPS},
        **{name: draw.choice((1e-6, 1e-3)) for name in _EPSILONS},
    }


def layers(seed: int) -> int:
    """Return the number of layers."""
    return (6, 5, 4, 3)[seed % 4]


def retiled(values: Mapping[str, Any], seed: int, model_type: str) -> dict[str, Any]:
    """Return fields with a value for each of four layers, as fields for the layers of a variant in another order."""
    draw, number, made = draw_for(seed, model_type), layers(seed), dict[str, Any]()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == 4 and not isinstance(value[0], list):
            kinds = sorted({*value}, key=str)
            places = [*kinds, *(draw.choice(kinds) for _ in range(number - len(kinds)))]
            draw.shuffle(places)
            value = places[:number]
        made[name] = value
    return made


def rotary(given: Any, draw: random.Random) -> Any:
    """Return other parameters of a rotary embedding. Those that differ by layer type only get another base."""
    if not isinstance(given, dict) or not given:
        return given
    if any(isinstance(value, dict) for value in given.values()):
        return {name: _with_base(value, draw) if isinstance(value, dict) else value for name, value in given.items()}
    if given.get("rope_type", "default") != "default":
        return _with_base(given, draw)
    return _with_base(given, draw) | draw.choice(_SCALINGS)


def _with_base(given: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    share = {"partial_rotary_factor": draw.choice((0.25, 0.5, 1.0))} if "partial_rotary_factor" in given else {}
    return {**given, "rope_theta": draw.choice((50.0, 1e4)), **share}


_SCALINGS: Sequence[dict[str, Any]] = (
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)

OPTIONAL: Sequence[Sequence[str]] = (
    (),
    ("rope_parameters",),
    ("partial_rotary_factor", "rotary_dim"),
    ("q_lora_rank",),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    _FLAGS,
    (*_FLAGS, *_CAPS, "q_lora_rank", "n_shared_experts", "num_shared_experts", "rope_parameters"),
)
"""Groups of fields to leave at the usual values, one after the other, if an architecture does not accept them."""
