"""Unusual configurations of every family and unusual options are computed correctly or refused by the controller."""

from typing import Any

import pytest
from rank_backend import policy_of
from rank_host import needs_megatron
from small_models import MODELS, hf_config
from transformers import PretrainedConfig

from nemo_rl.models.megatron.model import model_check
from nemo_rl.models.megatron.model.model_check import check_expressible, check_options, check_overrides
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.errors import ConfigError

TOLERANCE = 3e-5
"""Of float32, relative to the largest value; kernels of some processors reach 1.2e-5."""
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LENGTHS = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
_DYNAMIC = _LENGTHS | {"rope_type": "dynamic"}
_LONG = _LENGTHS | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_YARN = _LENGTHS | {"rope_type": "yarn"}
_ROTARIES: list[dict[str, Any]] = [
    _DYNAMIC,
    _LONG,
    _PLAIN | {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    _YARN,
    _YARN | {"attention_factor": 0.7},
]
_OF_ANY: list[dict[str, Any]] = [
    {"head_dim": 20},
    {"hidden_size": 60, "head_dim": None},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"num_attention_heads": 6, "num_key_value_heads": 4},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 2},
    {"tie_word_embeddings": True},
    {"rms_norm_eps": 1e-3},
    {"hidden_act": "gelu"},
    {"num_hidden_layers": 1},
    {"attention_bias": True},
    {"mlp_bias": True},
]
_OF_TYPE: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [
        {"num_experts_per_tok": 1, "norm_topk_prob": True},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts_per_tok": 4},
        {"num_experts_per_tok": 5},
        {"num_experts": 3},
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"decoder_sparse_step": 0},
        {"decoder_sparse_step": 4},
        {"mlp_only_layers": [9]},
    ],
    "gpt_oss": [
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 4},
        {"num_local_experts": 3},
        {"num_local_experts": 1, "num_experts_per_tok": 1},
        {"swiglu_limit": 7.0},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["chunked_attention"] * 3},
    ],
    "deepseek_v3": [
        {"num_experts_per_tok": 1},
        {"n_shared_experts": 0},
        {"n_shared_experts": 2},
        {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 0},
        {"n_group": 1, "topk_group": 1},
        {"n_group": 2, "topk_group": 2},
        {"n_group": 3},
        {"n_group": 8, "topk_group": 2},
        {"topk_group": 5},
        {"routed_scaling_factor": 1.0},
        {"num_key_value_heads": 2},
        {"v_head_dim": 16},
    ],
    "gemma3_text": [
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["sliding_attention"] * 3},
        {"final_logit_softcapping": 5.0},
        {"hidden_activation": "silu"},
        {"query_pre_attn_scalar": 7},
        {"tie_word_embeddings": False},
        {"use_bidirectional_attention": True},
    ],
}
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")


def _odd() -> list[tuple[str, dict[str, Any]]]:
    found = [(name, {"rope_parameters": rotary}) for name in (*_DENSE, "deepseek_v3") for rotary in _ROTARIES]
    windowed = {"sliding_attention": _PLAIN}
    found += [("gemma3_text", {"rope_parameters": windowed | {"full_attention": rotary}}) for rotary in _ROTARIES]
    found += [(name, values) for name in (*_DENSE, "gemma3_text") for values in _OF_ANY]
    return found + [(name, values) for name, all_values in _OF_TYPE.items() for values in all_values]


def _made(name: str, values: dict[str, Any]) -> PretrainedConfig | None:
    """Return the configuration; None if transformers itself refuses it."""
    try:
        return hf_config(name, **values)
    except Exception as error:
        assert "alidation" in type(error).__name__
        return None


def _outcomes(rank: int, num_ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    from witness import compare

    wrong = []
    for name, values in cases:
        try:
            logits, gradients, worst = compare(name, packed=False, values=values)
        except Exception as error:
            wrong.append(f"{name} {values}: {error!r}")
            continue
        if not max(logits, gradients) < TOLERANCE:
            wrong.append(f"{name} {values}: logits {logits:g}, gradients {gradients:g} ({worst})")
    return wrong


@needs_megatron
def test_an_unusual_model_is_correct_or_refused_by_the_controller(host) -> None:
    accepted, refused = [], 0
    for name, values in _odd():
        config = _made(name, values)
        try:
            if config is not None:
                check_expressible(config)
                accepted.append((name, values))
        except ConfigError as error:
            assert "Megatron Core cannot express this" in str(error)
            refused += 1
    assert refused > 40 and len(accepted) > 60
    assert host.run(_outcomes, 1, accepted) == [[]]


@pytest.mark.parametrize(
    "rotary", [_DYNAMIC, _LONG, _PLAIN | {"partial_rotary_factor": 0.5}], ids=["ntk", "long", "part"]
)
def test_the_backend_refuses_rotary_settings_before_any_rank_starts(rotary, tmp_path) -> None:
    hf_config("llama", rope_parameters=rotary).save_pretrained(tmp_path)
    policy = policy_of(str(tmp_path))
    with pytest.raises(ConfigError, match="rope_parameters"):
        training_backend(policy).check(policy, 1)


SELECTIVE = {"activation_checkpointing": True, "recompute_granularity": "selective"}
OPTIONS: list[dict[str, Any]] = [
    *({**SELECTIVE, "recompute_modules": [each]} for each in ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe")),
    {**SELECTIVE, "recompute_modules": ["moe_act"], "moe_grouped_gemm": False},
    {**SELECTIVE, "recompute_modules": None},
    {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    {"moe_router_load_balancing_type": "global_aux_loss"},
    {"moe_router_enable_expert_bias": True},
    {"moe_router_enable_expert_bias": False},
    {"moe_router_bias_update_rate": 0.1, "moe_router_enable_expert_bias": True},
    {"moe_router_num_groups": 2},
    {"moe_router_group_topk": 2},
    {"moe_router_group_topk": 1, "moe_router_num_groups": 2},
    {"moe_router_group_topk": 3, "moe_router_num_groups": 2},
    {"moe_router_group_topk": 1, "moe_router_num_groups": 3},
    {"moe_token_dispatcher_type": "allgather"},
    {"moe_shared_expert_overlap": True},
    {"moe_router_dtype": None},
    {"gradient_accumulation_fusion": True},
    {"peft": {"enabled": True, "dim": 4}},
    {"model_overrides": {"layernorm_epsilo": 1.0}},
    {"model_overrides": {"layernorm_epsilon": 1e-3}},
    {"model_overrides": {"num_layers": 5}},
    {"model_overrides": {"batch_p2p_comm": True}},
    {"attention_backend": "flash"},
]


def _built(rank: int, num_ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    import os

    from test_layers import chunks_of

    wrong = []
    for name, options in cases:
        for variable in model_check._KERNEL_VARIABLES:  # a rank builds one model; Megatron Core sets them then
            os.environ.pop(variable, None)
        try:
            chunks_of(name, **options)
        except Exception as error:
            wrong.append(f"{name} {options}: {error!r}")
    return wrong


@needs_megatron
def test_options_that_the_controller_accepts_build_on_the_ranks(host, monkeypatch) -> None:
    for variable in model_check._KERNEL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    accepted, refused = [], set()
    for name in MODELS:
        fields = check_expressible(hf_config(name))
        for options in OPTIONS:
            findings = list(check_options("policy.megatron_cfg", policy_of(**options).megatron_cfg, fields))
            if findings:
                refused.add(str(options))
            else:
                accepted.append((name, options))
    assert len(refused) == 10
    assert host.run(_built, 1, accepted) == [[]]


@pytest.mark.parametrize("variable", model_check._KERNEL_VARIABLES)
def test_variables_that_contradict_the_attention_kernels_are_refused(variable, monkeypatch) -> None:
    for each in model_check._KERNEL_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    fields = check_expressible(hf_config("llama"))
    section = policy_of().megatron_cfg
    assert list(check_options("policy.megatron_cfg", section, fields)) == []
    monkeypatch.setenv(variable, "0")
    (finding,) = check_options("policy.megatron_cfg", section, fields)
    assert f"{variable}=0" in finding and "attention_backend=auto" in finding


def _real_fields(rank: int, num_ranks: int) -> dict[str, set[str]]:
    import dataclasses

    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return {
        kind.__name__: {each.name for each in dataclasses.fields(kind)}
        for kind in (TransformerConfig, MLATransformerConfig)
    }


@needs_megatron
def test_fields_parsed_from_the_source_equal_those_of_the_classes(host) -> None:
    (found,) = host.run(_real_fields, 1)
    assert {kind: set(model_check._fields_of(kind)) for kind in found} == found


def test_fields_are_not_checked_without_megatron_core() -> None:
    assert list(check_overrides("policy.megatron_cfg", {"anything": 1}, (), "TransformerConfig")) == []
