"""Check before Ray starts that Megatron Core can express a model and accepts its options.

The module reads configurations and the source of Megatron Core's configuration classes, and does not import megatron.
Invariant: a model or option that ranks would refuse on every machine is refused here, with the same message or a better
one.
"""

import ast
import difflib
import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.models.megatron.conversion.rules import FAMILIES as LAYERS
from nemo_rl.models.megatron.model.families import family_of, sparse_layers
from nemo_rl.models.megatron.model.family import DeltaNets, Hybrid
from nemo_rl.utils.errors import ConfigError

_FIXED = (
    *("calculate_per_token_loss", "variable_seq_lengths", "batch_p2p_comm"),
    *("mtp_detach_heads", "mtp_loss_scaling_factor", "mtp_num_layers", "mtp_use_repeated_layer"),
)
"""Fields that cannot be overridden, because `schedule` and `mtp` depend on their values."""
_OF_THE_WEIGHTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "multi_latent_attention",
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "attention_output_gate", "moe_shared_expert_gate"),
)
"""Fields that cannot be overridden, because they determine the names and shapes of the weights."""
_WITH_STATES = {Hybrid: "Mamba-2", DeltaNets: "gated delta nets"}
_READ_QUANTIZED = ("fp8", "mxfp4")
_SOURCES = ("model_parallel_config.py", "transformer/transformer_config.py")
_KERNEL_CHOICES = {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}
"""Values of `_KERNEL_VARIABLES` that Megatron Core requires for each `attention_backend`."""
_KERNEL_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def check_expressible(model: PretrainedConfig, *, generates: bool = False) -> dict[str, Any]:
    """Translate a model's configuration for Megatron Core, as each rank does later.

    Args:
        generates: whether the model is that of an engine.

    Returns:
        The fields of `TransformerConfig` that the architecture fixes.

    Raises:
        ConfigError: Megatron Core cannot express the model; the message names the field.
    """
    family = family_of(model)
    fields = family.transformer_fields(model)
    family.model_arguments(model)
    family.rotary(model)
    family.embedding_scale(model)
    _check_files(model)
    hybrid = family.hybrid(model)
    if generates and hybrid is not None:
        raise ConfigError(
            f"this engine keeps no states from token to token, and {model.model_type} has layers with states "
            f"({_WITH_STATES[type(hybrid)]})."
        )
    return fields


def _check_files(model: PretrainedConfig) -> None:
    """Refuse files with quantized weights that `conversion.sources` cannot read."""
    described: Any = getattr(model, "quantization_config", None) or {}
    method = described.get("quant_method") if isinstance(described, dict) else described.quant_method
    if method is not None and str(getattr(method, "value", method)) not in _READ_QUANTIZED:
        raise ConfigError(
            f"the files of this {model.model_type} model have weights quantized by {method}, and policy.megatron_cfg "
            f"reads {' and '.join(_READ_QUANTIZED)}. Use files with 16-bit weights."
        )


def check_options(keys: str, asked: MegatronConfig, fields: Mapping[str, Any]) -> Findings:
    """Yield the options that do not exist, do not apply to a model, or contradict it.

    Args:
        keys: name of the section, such as `policy.megatron_cfg`.
        fields: result of `check_expressible`.
    """
    kind = "MLATransformerConfig" if fields.get("multi_latent_attention") else "TransformerConfig"
    yield from check_overrides(keys, asked.model_overrides, _fields_of(kind), kind)
    for name in _OF_THE_WEIGHTS:
        if name in asked.model_overrides:
            yield (
                f"{keys}.model_overrides.{name} follows from the weights of the model and cannot be set. Leave it out."
            )
    yield from _check_recomputation(keys, asked, fields)
    if fields.get("num_moe_experts"):
        yield from _check_routing(keys, asked, fields)
    yield from _check_kernel_variables(keys, asked)


def check_mtp(section: str, policy: PolicyConfig, model: PretrainedConfig) -> Findings:
    """Yield the reasons why the configured multi-token prediction, if any, cannot be trained.

    Args:
        section: name of the section, such as `policy`.
    """
    asked = policy.megatron_cfg
    if not asked.mtp_num_layers:
        return
    key = f"{section}.megatron_cfg.mtp_num_layers={asked.mtp_num_layers}"
    if LAYERS[model.model_type].mtp_norms is None:
        known = ", ".join(sorted(name for name, layers in LAYERS.items() if layers.mtp_norms is not None))
        what = f"{model.model_type} models have no such layers that can be trained ({known} models have)"
        yield f"{key}: {what}. Set it to 0."
        return
    held, field = _mtp_layers_of_files(model)
    if asked.num_mtp_modules > held:
        yield (
            f"{key}: {policy.model_name!r} has {held} such layers ({field}). Set it to at most {held}"
            + (f", or {section}.megatron_cfg.mtp_use_repeated_layer=true." if held else ".")
        )
    if model.model_type == "nemotron_h":
        yield from _check_nemotron_mtp(key, model)
    elif not LAYERS[model.model_type].has_one_mtp_layer and not any(sparse_layers(model)):
        yield f"{key}: these layers have experts, and by first_k_dense_replace no other layer has. Set it to 0."
    if policy.reward_model_cfg.enabled:
        yield f"{key}: a reward model or critic predicts no tokens. Set it to 0."
    if asked.peft.enabled:
        yield f"{key} with {section}.megatron_cfg.peft.enabled=true is not built. Set it to 0."


_ONE_MTP_LAYER = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields with the number of layers for multi-token prediction of Qwen3-Next and Qwen3.5. Some files have neither."""


def _mtp_layers_of_files(model: PretrainedConfig) -> tuple[int, str]:
    """Return the number of layers for multi-token prediction in a model's files, and the field that has it."""
    usual = "num_nextn_predict_layers"
    if not LAYERS[model.model_type].has_one_mtp_layer or model.model_type == "nemotron_h":
        return getattr(model, usual, 0) or 0, usual
    field = next((name for name in _ONE_MTP_LAYER if getattr(model, name, None) is not None), None)
    return (1, "as every model of this type") if field is None else (min(getattr(model, field), 1), field)


def _check_nemotron_mtp(key: str, model: PretrainedConfig) -> Findings:
    kinds = list(model.mtp_layers_block_type or ())
    if kinds != ["full_attention", "moe"]:
        yield f"{key}: such layers of this model are {kinds}, and only full_attention with moe is built. Set it to 0."
    elif "moe" not in model.layers_block_type:
        yield f"{key}: these layers have experts, and by layers_block_type no other layer has. Set it to 0."


def check_overrides(keys: str, overrides: Collection[str], known: Collection[str], kind: str) -> Findings:
    """Check that overrides are fields of Megatron Core's configuration and may be changed.

    Args:
        keys: name of the section, such as `policy.megatron_cfg`.
        overrides: names of the fields in `model_overrides`.
        known: fields of the configuration class; empty if they are unknown.
        kind: name of the configuration class.
    """
    for name in overrides:
        if name in _FIXED:
            yield (
                f"{keys}.model_overrides.{name} cannot be set: the losses and the messages between stages rely on its "
                "value, and would be silently wrong. Leave it out."
            )
        elif known and name not in known:
            nearest = difflib.get_close_matches(name, known, n=3)
            yield f"{keys}.model_overrides.{name} is no field of Megatron Core's {kind}" + (
                f"; did you mean {', '.join(nearest)}?" if nearest else "."
            )


@cache
def _fields_of(kind: str) -> Collection[str]:
    """Read a dataclass's field names from Megatron Core's source. Return none if it is not installed."""
    package = importlib.util.find_spec("megatron")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    sources = [Path(folder) / "core" / name for folder in folders for name in _SOURCES]
    classes = {
        each.name: each
        for source in sources
        if source.exists()
        for each in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
    }
    return frozenset(_annotated(kind, classes))


def _annotated(kind: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    if kind not in classes:
        return
    for line in classes[kind].body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id
    for base in classes[kind].bases:
        if isinstance(base, ast.Name):
            yield from _annotated(base.id, classes)


def _check_recomputation(keys: str, asked: MegatronConfig, fields: Mapping[str, Any]) -> Findings:
    if not asked.activation_checkpointing or asked.recompute_granularity != "selective":
        return
    modules = asked.recompute_modules or ()
    lacks = {
        "mla_up_proj": "latent attention" * (not fields.get("multi_latent_attention")),
        "moe_act": "experts" * (not fields.get("num_moe_experts")),
    }
    for module in modules:
        if lacks.get(module):
            yield f"{keys}.recompute_modules has {module}, and the model has no {lacks[module]}. Take it out."
    if "moe_act" in modules and asked.moe_grouped_gemm is False:
        yield (
            f"{keys}.recompute_modules has moe_act, which only {keys}.moe_grouped_gemm=true can recompute. Take it "
            "out, or leave moe_grouped_gemm at null."
        )


def _check_routing(keys: str, asked: MegatronConfig, fields: Mapping[str, Any]) -> Findings:
    """Check that routing options do not contradict each other or the model."""
    if asked.moe_router_enable_expert_bias and fields["moe_router_score_function"] == "softmax":
        yield (
            f"{keys}.moe_router_enable_expert_bias=true needs routing by sigmoids, and this model routes by a softmax. "
            "Leave it at null."
        )
    experts = fields["num_moe_experts"]
    groups = asked.moe_router_num_groups or fields.get("moe_router_num_groups")
    chosen = asked.moe_router_group_topk or fields.get("moe_router_group_topk")
    if chosen and not groups:
        yield f"{keys}.moe_router_group_topk={chosen} needs {keys}.moe_router_num_groups, how many groups there are."
    if not chosen or not groups:
        return
    if experts % groups:
        divisors = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        yield f"{keys}.moe_router_num_groups={groups} does not divide the {experts} experts. Use one of {divisors}."
    if chosen > groups:
        yield f"{keys}.moe_router_group_topk={chosen} is more than the {groups} groups. Use at most {groups}."


def _check_kernel_variables(keys: str, asked: MegatronConfig) -> Findings:
    """Check that environment variables agree with the values that Megatron Core requires for `attention_backend`."""
    choice = asked.attention_backend or "auto"
    present = {**os.environ, **(asked.env_vars or {})}
    wanted = dict(zip(_KERNEL_VARIABLES, _KERNEL_CHOICES[choice], strict=True))
    wrong = [f"{name}={present[name]}" for name, value in wanted.items() if present.get(name, value) != value]
    if wrong:
        yield (
            f"{', '.join(wrong)} in the environment contradicts {keys}.attention_backend={choice}, by which these "
            f"variables are set. Unset {'them' if len(wrong) > 1 else 'it'}, and choose by the key: "
            f"{', '.join(_KERNEL_CHOICES)}."
        )
