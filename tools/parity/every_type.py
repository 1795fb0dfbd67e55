"""Make a tiny model of every causal language model type that the installed transformers knows.

Sizes are set by the names of configuration fields, so types of later versions need no change here; `SPECIAL` has
further fields of single types. With a seed, other sizes and options are drawn (`variants`). Invariant: sizes divide by
2 without a seed, all randomness in training is off, and a model has every kind of layer that its configuration can have
in four layers.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from parity import families, variants
from parity.models import VOCABULARY

_LAYERS = 4
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "lru_width"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "n_inner", "dff", "d_inner", "dim_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "feed_forward_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), _LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_heads", "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_head_dim"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "zero_expert_num"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), 6),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size", "rel_extent"), 6),
    "index_topk": 64,  # with fewer, ties between scores of exactly zero are random
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "interleave_moe_layer_step"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "max_window_layers"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    "mamba_d_ssm": 128,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "rotary_dim": 8,
    "initializer_range": 0.12,
    "init_std": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "query_pre_attn_scalar": 16,
    "use_sliding_window": True,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "use_cache": False,
}
_OFF = re.compile(r"dropout|pdrop|drop_rate|layerdrop|jitter|drop_p|_drop$")
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "gpt_oss", "ministral"), _HYBRID),
    **dict.fromkeys(("vaultgemma", "cwm", "modernbert-decoder", "gemma4_text", "afmoe"), _HYBRID),
    **dict.fromkeys(("minimax", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _LINEAR),
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "mpt": {"attn_config": {"alibi": True}},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8} | _HYBRID,
    "doge": {"num_experts": 16, "is_moe": False},
    "falcon_h1": {"mamba_d_ssm": 128, "mlp_multipliers": [0.9, 1.1], "embedding_multiplier": 3.0},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "minicpm3": {"scale_emb": 3, "dim_model_base": 32},
    "nemotron_h": {"sliding_window": None, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "router_hidden_size": 16},
}
"""Fields that a single type needs in addition to `_SIZES`."""


def model_types() -> list[str]:
    """Return the names of all types."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str, seed: int | None = None) -> PreTrainedModel:
    """Make a model in float32 with random weights, in eval mode.

    Args:
        model_type: name of the type.
        seed: of a drawn variant; the usual sizes by default.

    Raises:
        ValueError: no small configuration of the type gives a working model; lists the error of each attempt.
    """
    return tiny_form(model_type, seed)[0]


def tiny_form(model_type: str, seed: int | None = None, named: str = "") -> tuple[PreTrainedModel, PretrainedConfig]:
    """Make a `tiny_model`, and the configuration of files that it is loaded from, which may describe more than text.

    Args:
        model_type: name of the type.
        seed: of a drawn variant; the usual sizes by default.
        named: name of a variant in `families`, which need not read from left to right.

    Raises:
        ValueError: no small configuration of the type gives a working model; lists the error of each attempt.
    """
    reasons: list[str] = []
    fields = families.fields_of(model_type, named) if named else {}
    for values in _attempts() if seed is None else _variants(model_type, seed):
        try:
            config = _small(CONFIG_MAPPING[model_type], values, model_type, seed, fields)
            model = _made(deepcopy(config))
            _require_running(model, from_left=not named)
            return model, config
        except Exception as error:  # noqa: BLE001  (the code of any architecture)
            reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}")
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def save_tiny_model(model_type: str, folder: Path, seed: int | None = None, named: str = "") -> str:
    """Write the model of a `tiny_form` to a folder; return the folder's name."""
    tiny_form(model_type, seed, named)[0].save_pretrained(folder)
    return str(folder)


def _attempts(sizes: Mapping[str, Any] = _SIZES) -> list[dict[str, Any]]:
    """Return sizes to try, in order: some types need equal numbers of key and query heads, or compute some sizes."""
    heads = sizes["num_attention_heads"]
    same_heads = dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), heads)
    kept = [name for name in sizes if name not in ("head_dim", "qk_head_dim", "rotary_dim")]
    fewest = [name for name in kept if not name.startswith(("mamba", "q_lora", "index", "chunk"))]
    forms = [[*sizes], kept, fewest]
    with_same = [{**sizes, **same_heads}] if sizes["num_key_value_heads"] != heads else []
    return [{**sizes}, *with_same, *({name: sizes[name] for name in form} for form in forms[1:])]


def _variants(model_type: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the sizes of a variant, and then with groups of fields at their usual values."""
    drawn = variants.sizes(seed, model_type)
    for usual in variants.OPTIONAL:
        own = {name: value for name, value in drawn.items() if name not in usual}
        for sizes in _attempts(_SIZES | own):
            yield sizes | {"rope_parameters": None if "rope_parameters" in usual else _DRAWN}


_DRAWN = object()
"""Value of `rope_parameters` that stands for drawn parameters."""


def _small(
    kind: type[PretrainedConfig],
    values: dict[str, Any],
    model_type: str,
    seed: int | None = None,
    fields: families.Fields = {},  # noqa: B006  (read only)
) -> PretrainedConfig:
    """Build a configuration of a class; parts for text and other inputs get the same sizes.

    Args:
        kind: the class.
        values: of the fields, of which it takes those that it has.
        model_type: key of `SPECIAL`; "" if the part has no special fields.
        seed: of a drawn variant.
        fields: of a named variant.

    Raises:
        ValueError: the class has no such field.
    """
    default = kind()
    special = SPECIAL.get(model_type, {}) if model_type else {"layer_types": None}
    values = values | (special if seed is None else variants.retiled(special, seed, model_type)) | fields
    names = [(alias, name) for pair in kind.attribute_map.items() for alias, name in (pair, pair[::-1])]
    others = {alias for alias, name in names if name in fields}  # other names of fields that are given
    own = {name: value for name, value in values.items() if value is not _DRAWN and name not in others}
    if seed is not None and model_type and len(own) < len(values):
        usual = getattr(default, "rope_parameters", None)
        own["rope_parameters"] = variants.rotary(usual, variants.draw_for(seed, model_type))
    parts: dict[str, Any] = {}
    for name in kind.sub_configs:
        if isinstance(getattr(default, name, None), PretrainedConfig):
            inner = type(getattr(default, name))
            parts[name] = _small(inner, values, inner.model_type if name == "text_config" else "", seed).to_dict()
    known = {*vars(default), *kind.attribute_map, *getattr(kind, "__dataclass_fields__", {})}
    if unknown := fields.keys() - known:
        raise ValueError(f"{kind.__name__} has no {sorted(unknown)}")
    unset = {*fields, *(variants.MAY_BE_NONE if seed is not None else ())}
    given = {name: value for name, value in own.items() if name in known and (value is not None or name in unset)}
    given |= {name: 0.0 for name, value in vars(default).items() if _OFF.search(name) and isinstance(value, float)}
    return kind(**given | parts)


def _made(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
        if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
            raise ValueError("its configuration has no small form")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def _require_running(model: PreTrainedModel, *, from_left: bool = True) -> None:
    tokens = torch.arange(3, 23)[None]
    logits = model(input_ids=tokens, use_cache=False).logits
    if logits.shape[:2] != tokens.shape or not bool(logits.isfinite().all()):
        raise ValueError(f"its logits have the shape {list(logits.shape)}, or are not finite")
    again = model(input_ids=tokens.clone(), use_cache=False).logits
    shorter = model(input_ids=tokens[:, :12], use_cache=False).logits
    if not torch.equal(logits, again):
        raise ValueError("it gives other numbers every time")
    if from_left and float((logits[:, :12] - shorter).abs().max()) > 1e-3 * float(logits.abs().max()):
        raise ValueError("it does not read from left to right")
