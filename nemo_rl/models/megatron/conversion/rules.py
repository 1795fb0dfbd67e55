"""Define rules that map each parameter of a whole Megatron Core model to hub tensors and back.

To add a family of models, add an item to `FAMILIES` that uses the functions above it. Rules use the parameter names of
Megatron Core's own modules (`get_gpt_decoder_block_spec` without Transformer Engine). `parts` maps the names of
Transformer Engine's modules to these names. The module does not import megatron.

Invariant: each hub tensor and each exported parameter belongs to exactly one bundle (`Rules.bundles`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, override

from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.models.huggingface.sizes import head_size
from nemo_rl.models.megatron.conversion.parts import ByHeads, Grouped, HeadRows, Part, Rule, Stacked, blocks
from nemo_rl.models.megatron.model.families import qwen_sparse_layers, sparse_layers
from nemo_rl.utils.errors import ConfigError

type LayerRules = Callable[[Any, int, str, str], Iterator[Rule]]
"""Yields the rules of a layer's attention or MLP; takes `(config, layer number, parameter prefix, hub prefix)`."""

_GATED = Stacked(2)

_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
}


_MTP_NORMS = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}


@dataclass(frozen=True)
class Layers:
    """Rules of the layers of a family of models."""

    attention: LayerRules
    """Rules of `self_attention`."""
    mlp: LayerRules
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    """Hub name of each norm of a layer, by Megatron Core's name."""
    mlp_name: str = "mlp"
    """Hub name of a layer's MLP."""
    layer_prefix: str = "model.layers."
    """Hub name of the list of layers."""
    embedding: str = "model.embed_tokens.weight"
    """Hub name of the token embeddings."""
    final_norm: str = "model.norm.weight"
    """Hub name of the weight of the norm after all layers."""
    mtp_norms: Mapping[str, str] | None = None
    """Hub name of each norm of a multi-token-prediction layer outside of its transformer layer, by Megatron Core's
    name. None if the family has no multi-token-prediction layers."""
    has_one_mtp_layer: bool = False
    """Whether files have at most one multi-token-prediction layer, whose names do not follow those of other layers."""

    def of(self, config: PretrainedConfig, number: int) -> Iterator[Rule]:
        """Yield all rules of a layer."""
        return self._of(config, number, f"decoder.layers.{number}.")

    def of_mtp(self, config: PretrainedConfig, depth: int) -> Iterator[Rule]:
        """Yield all rules of a multi-token-prediction layer. In hub names its number follows those of other layers.

        Args:
            depth: number of the layer among the multi-token-prediction layers, from 0.

        Raises:
            ConfigError: the family has no multi-token-prediction layers.
        """
        if self.mtp_norms is None:
            raise ConfigError(f"model_type={config.model_type} has no multi-token-prediction layers.")
        number = config.num_hidden_layers + depth
        ours, theirs = f"mtp.layers.{depth}.", f"{self.layer_prefix}{number}."
        for parameter, name in self.mtp_norms.items():
            yield _same(f"{ours}{parameter}.weight", f"{theirs}{name}.weight")
        yield _same(f"{ours}eh_proj.weight", f"{theirs}eh_proj.weight", dim=0)
        yield from self._of(config, number, f"{ours}mtp_model_layer.")

    def _of(self, config: PretrainedConfig, number: int, ours: str) -> Iterator[Rule]:
        theirs = f"{self.layer_prefix}{number}."
        for parameter, name in self.norms.items():
            yield _same(f"{ours}{parameter}.weight", f"{theirs}{name}.weight")
        yield from self.attention(config, number, f"{ours}self_attention.", f"{theirs}self_attn.")
        yield from self.mlp(config, number, f"{ours}mlp.", f"{theirs}{self.mlp_name}.")


_MTP = "mtp."
"""Prefix of the hub names of multi-token-prediction layers in families that do not number them among others."""
_OWN_MTP, _LAYER_OF_MTP = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."
"""Megatron Core's names of the only multi-token-prediction layer, and of the transformer layer in it."""


class NemotronLayers(Layers):
    """Rules of the layers of Nemotron-H, which have one norm and one block: Mamba-2, attention, MLP or experts."""

    @override
    def of_mtp(self, config: PretrainedConfig, depth: int) -> Iterator[Rule]:
        first, last = "mtp.layers.0.", "mtp.layers.1."  # a layer with attention, and one with experts
        for name in ("enorm", "hnorm"):
            yield _same(f"{_OWN_MTP}{name}.weight", f"{first}{name}.weight")
        yield _same(f"{_OWN_MTP}eh_proj.weight", f"{first}eh_proj.weight", dim=0)
        yield _same(f"{_OWN_MTP}final_layernorm.weight", f"{last}final_layernorm.weight")
        yield _same(f"{_LAYER_OF_MTP}input_layernorm.weight", f"{first}norm.weight")
        yield _same(f"{_LAYER_OF_MTP}pre_mlp_layernorm.weight", f"{last}norm.weight")
        yield from self.attention(config, 0, f"{_LAYER_OF_MTP}self_attention.", f"{first}mixer.")
        yield from _nemotron_moe(config, 0, f"{_LAYER_OF_MTP}mlp.", f"{last}mixer.")

    @override
    def _of(self, config: PretrainedConfig, number: int, ours: str) -> Iterator[Rule]:
        theirs, kind = f"{self.layer_prefix}{number}.", config.layers_block_type[number]
        in_mlp = kind in ("mlp", "moe")
        norm = "pre_mlp_layernorm" if in_mlp else "input_layernorm"
        yield _same(f"{ours}{norm}.weight", f"{theirs}norm.weight")
        rules = {"full_attention": self.attention, "linear_attention": _mamba, "mlp": self.mlp, "moe": _nemotron_moe}
        place = "mlp" if in_mlp else "self_attention"
        yield from rules[kind](config, number, f"{ours}{place}.", f"{theirs}mixer.")


class DeltaLayers(Layers):
    """Rules of the layers of Qwen3-Next and Qwen3.5, of which some have a gated delta net in place of attention."""

    @override
    def of_mtp(self, config: PretrainedConfig, depth: int) -> Iterator[Rule]:
        for parameter, name in (self.mtp_norms or {}).items():
            yield _same(f"{_OWN_MTP}{parameter}.weight", f"{_MTP}{name}.weight")
        yield _same(f"{_OWN_MTP}eh_proj.weight", f"{_MTP}fc.weight", dim=0)
        theirs, sparse = "mtp.layers.0.", qwen_sparse_layers(config)
        for parameter, name in self.norms.items():
            yield _same(f"{_LAYER_OF_MTP}{parameter}.weight", f"{theirs}{name}.weight")
        yield from self.attention(config, 0, f"{_LAYER_OF_MTP}self_attention.", f"{theirs}self_attn.")
        number = sparse.index(True) if any(sparse) else 0
        yield from self.mlp(config, number, f"{_LAYER_OF_MTP}mlp.", f"{theirs}{self.mlp_name}.")

    @override
    def _of(self, config: PretrainedConfig, number: int, ours: str) -> Iterator[Rule]:
        if config.layer_types[number] == "full_attention":
            yield from super()._of(config, number, ours)
            return
        theirs = f"{self.layer_prefix}{number}."
        for parameter, name in self.norms.items():
            yield _same(f"{ours}{parameter}.weight", f"{theirs}{name}.weight")
        yield from _delta_net(config, number, f"{ours}self_attention.", f"{theirs}linear_attn.")
        yield from self.mlp(config, number, f"{ours}mlp.", f"{theirs}{self.mlp_name}.")


def _same(parameter: str, name: str, dim: int | None = None, **values: Any) -> Rule:
    return Rule(parameter, (Part(name),), dim=dim, **values)


def _attention(
    config: Any,
    number: int,
    ours: str,
    theirs: str,
    *,
    qkv_bias: bool | None = None,
    has_output_bias: bool | None = None,
    normed_heads: bool = False,
    has_sinks: bool = False,
    has_gates: bool = False,
) -> Iterator[Rule]:
    """Yield the rules of attention with grouped heads. If a bias is None, the value of the configuration is used."""
    configured = bool(getattr(config, "attention_bias", False))
    head_dim = head_size(config)
    groups = Grouped(config.num_attention_heads // config.num_key_value_heads, head_dim, has_gates)
    for kind in ("weight", "bias") if (configured if qkv_bias is None else qkv_bias) else ("weight",):
        parts = tuple(Part(f"{theirs}{name}_proj.{kind}") for name in "qkv")
        yield Rule(f"{ours}linear_qkv.{kind}", parts, groups, dim=0)
    yield _same(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", dim=1)
    if configured if has_output_bias is None else has_output_bias:
        yield _same(f"{ours}linear_proj.bias", f"{theirs}o_proj.bias")
    if normed_heads:
        yield _same(f"{ours}q_layernorm.weight", f"{theirs}q_norm.weight")
        yield _same(f"{ours}k_layernorm.weight", f"{theirs}k_norm.weight")
    if has_sinks:
        yield _same(f"{ours}core_attention.softmax_offset", f"{theirs}sinks", dim=0)


def _latent_attention(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of multi-head latent attention. Ranks do not divide its down projections."""
    biased = bool(config.attention_bias)
    if config.q_lora_rank is None:
        yield _same(f"{ours}linear_q_proj.weight", f"{theirs}q_proj.weight", dim=0)
    else:
        yield _same(f"{ours}linear_q_down_proj.weight", f"{theirs}q_a_proj.weight")
        if biased:
            yield _same(f"{ours}linear_q_down_proj.bias", f"{theirs}q_a_proj.bias")
        yield _same(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight")
        yield _same(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", dim=0)
    yield _same(f"{ours}linear_kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight")
    if biased:
        yield _same(f"{ours}linear_kv_down_proj.bias", f"{theirs}kv_a_proj_with_mqa.bias")
    yield _same(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight")
    yield _same(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", dim=0)
    yield _same(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", dim=1)
    if biased:
        yield _same(f"{ours}linear_proj.bias", f"{theirs}o_proj.bias")


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_PROJECTIONS = ("w1", "w3", "w2")


def _gated_mlp(
    config: Any, number: int, ours: str, theirs: str, names: tuple[str, str, str] = _PROJECTIONS
) -> Iterator[Rule]:
    """Yield the rules of gate, up and down projection, which have these names in the hub's files."""
    gate, up, down = names
    for kind in ("weight", "bias") if getattr(config, "mlp_bias", False) else ("weight",):
        gate_up = (Part(f"{theirs}{gate}.{kind}"), Part(f"{theirs}{up}.{kind}"))
        yield Rule(f"{ours}linear_fc1.{kind}", gate_up, _GATED, dim=0)
        yield _same(f"{ours}linear_fc2.{kind}", f"{theirs}{down}.{kind}", dim=1 if kind == "weight" else None)


def _experts(num_experts: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of gated experts, stored as separate tensors or as one tensor with all experts of a layer."""
    for expert in range(num_experts):
        stack = Part(f"{theirs}experts.gate_up_proj", expert)
        for rule in _gated_mlp(None, 0, f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}."):
            gate_up = (replace(stack, share=(0, 2)), replace(stack, share=(1, 2)))
            down = (Part(f"{theirs}experts.down_proj", expert),)
            yield replace(rule, expert=expert, stacked_parts=gate_up if rule.layout == _GATED else down)


def _qwen_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a router with experts, or of a dense layer, as configured for this layer."""
    if not qwen_sparse_layers(config)[number]:
        yield from _gated_mlp(config, number, ours, theirs)
        return
    yield _same(f"{ours}router.weight", f"{theirs}gate.weight")
    yield from _experts(config.num_experts, ours, theirs)


def _qwen_shared_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of `_qwen_moe` and, in layers with experts, of a shared expert whose output is gated."""
    yield from _qwen_moe(config, number, ours, theirs)
    if qwen_sparse_layers(config)[number]:
        yield from _gated_mlp(config, number, f"{ours}shared_experts.", f"{theirs}shared_expert.")
        yield _same(f"{ours}shared_experts.gate_weight", f"{theirs}shared_expert_gate.weight")


def _delta_net(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a gated delta net. Ranks divide the heads of each block of its parameters."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    fused = config.model_type == "qwen3_next"
    names = ("qkvz", "ba") if fused else ("qkv", "z", "b", "a")
    layout = _delta_rows_by_key(keys, values // keys, key, value) if fused else _delta_rows(keys, values, key, value)
    yield Rule(f"{ours}in_proj.weight", tuple(Part(f"{theirs}in_proj_{name}.weight") for name in names), layout, dim=0)
    convolved = blocks(keys * key, keys * key, values * value)
    yield Rule(f"{ours}conv1d.weight", (Part(f"{theirs}conv1d.weight"),), convolved, dim=0)
    for name in ("A_log", "dt_bias"):
        yield _same(f"{ours}{name}", f"{theirs}{name}", dim=0, full_precision=True)
    yield _same(f"{ours}out_norm.weight", f"{theirs}norm.weight")
    yield _same(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", dim=1)


def _delta_rows(keys: int, values: int, key: int, value: int) -> ByHeads:
    """Return the rows q | k | v | z | b | a, of parts that have q | k | v, z, b and a (Qwen3.5).

    Args:
        keys: number of heads of keys.
        values: number of heads of values.
        key: width of a head of keys.
        value: width of a head of values.
    """
    of_keys = (HeadRows(0, first, key, keys, key) for first in (0, keys * key))
    of_values = (HeadRows(0, 2 * keys * key, value, values, value), HeadRows(1, 0, value, values, value))
    return ByHeads((*of_keys, *of_values, HeadRows(2, 0, 1, values, 1), HeadRows(3, 0, 1, values, 1)))


def _delta_rows_by_key(keys: int, share: int, key: int, value: int) -> ByHeads:
    """Return the rows q | k | v | z | b | a, of parts that have q | k | v | z and b | a of each key head (Qwen3-Next).

    Args:
        keys: number of heads of keys.
        share: number of heads of values for each head of keys.
        key: width of a head of keys.
        value: width of a head of values.
    """
    sizes = (key, key, share * value, share * value)
    firsts = (sum(sizes[:place]) for place in range(len(sizes)))
    fused = (HeadRows(0, first, size, keys, sum(sizes)) for first, size in zip(firsts, sizes, strict=True))
    return ByHeads((*fused, *(HeadRows(1, place, share, keys, 2 * share) for place in (0, share))))


def _deepseek_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a router with correction bias, of experts and shared experts, or of a dense layer.

    Layers for multi-token prediction are like the last layer.
    """
    if not sparse_layers(config)[min(number, config.num_hidden_layers - 1)]:
        yield from _gated_mlp(config, number, ours, theirs)
        return
    yield _same(f"{ours}router.weight", f"{theirs}gate.weight")
    yield _same(f"{ours}router.expert_bias", f"{theirs}gate.e_score_correction_bias", full_precision=True)
    yield from _experts(config.n_routed_experts, ours, theirs)
    if config.n_shared_experts:
        yield from _gated_mlp(config, number, f"{ours}shared_experts.", f"{theirs}shared_experts.")


def _minimax_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a router, whose correction bias is not in the router's module, and of experts."""
    yield _same(f"{ours}router.weight", f"{theirs}gate.weight")
    yield _same(f"{ours}router.expert_bias", f"{theirs}e_score_correction_bias", full_precision=True)
    for expert in range(config.num_local_experts):
        prefixes = f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}."
        for rule in _gated_mlp(None, number, *prefixes, _MIXTRAL_PROJECTIONS):
            yield replace(rule, expert=expert)


def _grouped_biased_attention(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of attention with optional biases and norms of queries and keys."""
    normed, biased = config.use_qk_norm, config.attention_bias
    yield from _attention(config, number, ours, theirs, qkv_bias=biased, has_output_bias=False, normed_heads=normed)


def _plain_mlp(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of up and down projection."""
    yield _same(f"{ours}linear_fc1.weight", f"{theirs}up_proj.weight", dim=0)
    yield _same(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", dim=1)


def _nemotron_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a router with correction bias, of experts and shared experts, all without gate."""
    yield _same(f"{ours}router.weight", f"{theirs}gate.weight")
    yield _same(f"{ours}router.expert_bias", f"{theirs}gate.e_score_correction_bias", full_precision=True)
    for expert in range(config.n_routed_experts):
        prefix = f"{ours}experts.local_experts.{expert}."
        for rule in _plain_mlp(config, number, prefix, f"{theirs}experts.{expert}."):
            name = "up_proj" if rule.dim == 0 else "down_proj"
            yield replace(rule, expert=expert, stacked_parts=(Part(f"{theirs}experts.{name}", expert),))
    yield from _plain_mlp(config, number, f"{ours}shared_experts.", f"{theirs}shared_experts.")


def _mamba(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a Mamba-2 layer. Ranks divide each block of its input projection and of its convolution."""
    heads = config.mamba_num_heads
    inner, state = heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
    projected, convolved = blocks(inner, inner, state, state, heads), blocks(inner, state, state)
    yield Rule(f"{ours}in_proj.weight", (Part(f"{theirs}in_proj.weight"),), projected, dim=0)
    for kind in ("weight", "bias"):
        yield Rule(f"{ours}conv1d_{kind}", (Part(f"{theirs}conv1d.{kind}"),), convolved, dim=0)
    for name in ("A_log", "D", "dt_bias"):
        yield _same(f"{ours}{name}", f"{theirs}{name}", dim=0, full_precision=True)
    yield _same(f"{ours}norm.weight", f"{theirs}norm.weight", dim=0)
    # PEFT refuses this layer of Mamba models, because fused kernels read its weight (huggingface/peft, pull 2562).
    yield _same(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", dim=1, without_adapter=True)


def _gpt_oss_moe(config: Any, number: int, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a router and experts. One transposed tensor has all experts with interleaved gate and up."""
    yield _same(f"{ours}router.weight", f"{theirs}router.weight")
    yield _same(f"{ours}router.bias", f"{theirs}router.bias")
    for expert in range(config.num_local_experts):
        prefix = f"{ours}experts.local_experts.{expert}."
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            is_weight = kind == "weight"
            stack = Part(f"{theirs}experts.gate_up_proj{suffix}", expert, interleaved=True, transposed=is_weight)
            gate_up = (replace(stack, share=(0, 2)), replace(stack, share=(1, 2)))
            down = Part(f"{theirs}experts.down_proj{suffix}", expert, transposed=is_weight)
            yield Rule(f"{prefix}linear_fc1.{kind}", gate_up, _GATED, dim=0, expert=expert)
            yield Rule(f"{prefix}linear_fc2.{kind}", (down,), dim=1 if is_weight else None, expert=expert)


FAMILIES: dict[str, Layers] = {
    "llama": Layers(_attention, _gated_mlp),
    "mistral": Layers(_attention, _gated_mlp),
    "qwen2": Layers(partial(_attention, qkv_bias=True, has_output_bias=False), _gated_mlp),
    "qwen3": Layers(partial(_attention, normed_heads=True), _gated_mlp),
    "qwen3_moe": Layers(partial(_attention, normed_heads=True), _qwen_moe),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        DeltaLayers(
            partial(_attention, normed_heads=True, has_gates=True),
            _qwen_shared_moe,
            mtp_norms={"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final_layernorm": "norm"},
            has_one_mtp_layer=True,
        ),
    ),
    "deepseek_v3": Layers(_latent_attention, _deepseek_moe, mtp_norms=_MTP_NORMS),
    "glm4_moe": Layers(_grouped_biased_attention, _deepseek_moe, mtp_norms=_MTP_NORMS),
    "glm4_moe_lite": Layers(_latent_attention, _deepseek_moe, mtp_norms=_MTP_NORMS),
    "minimax_m2": Layers(partial(_attention, normed_heads=True), _minimax_moe, mlp_name="block_sparse_moe"),
    "nemotron_h": NemotronLayers(
        partial(_attention, qkv_bias=False, has_output_bias=False),
        _plain_mlp,
        layer_prefix="backbone.layers.",
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
        mtp_norms={name: name for name in ("enorm", "hnorm", "final_layernorm")},
        has_one_mtp_layer=True,
    ),
    "gemma3_text": Layers(partial(_attention, normed_heads=True), _gated_mlp, _SANDWICH_NORMS),
    "gpt_oss": Layers(partial(_attention, has_sinks=True), _gpt_oss_moe),
}
"""Layer rules by `model_type` of the configuration."""

HEAD = "lm_head.weight"
SCALAR_HEAD = "score.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_LAYERS_OF_MODULES = "model.layers."
"""Name of the list of layers in the causal language models of transformers."""
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Rules:
    """Rules of all parameters of a model."""

    by_parameter: dict[str, Rule]
    """Rules by parameter name, in the order of the model."""
    num_layers: int
    """Number of layers of the model, except multi-token-prediction layers."""
    num_mtp_layers: int
    """Number of multi-token-prediction layers in the model."""
    embedding: str
    """Hub name of the token embeddings."""
    is_tied: bool
    """Whether the head is the embedding (tied)."""
    has_scalar_head: bool
    """Whether the head is a reward model's scalar head."""
    layer_prefix: str
    """Hub name of the list of layers."""

    def module_name(self, name: str) -> str:
        """Return the name of a layer among the modules of transformers, given the name in the hub's files."""
        return name.replace(self.layer_prefix, _LAYERS_OF_MODULES, 1)

    def bundles(self) -> list[list[Rule]]:
        """Return lists of rules in model order. A list has all experts that share a hub tensor, or a single rule."""
        found: dict[str, list[Rule]] = {}
        for rule in self.by_parameter.values():
            if not rule.copy_of_tied:
                found.setdefault(rule.parts[0].name, []).append(rule)
        return list(found.values())

    def hub_names(self) -> list[str]:
        """Return the names of all hub tensors, in the order of bundles."""
        return list(dict.fromkeys(part.name for bundle in self.bundles() for rule in bundle for part in rule.parts))

    def untrained_mtp(self, names: Iterable[str]) -> list[str]:
        """Return the given hub names of multi-token-prediction layers that the model does not have."""
        names = list(names)
        further = [name for name, layer in _numbered(names) if layer >= self.num_layers + self.num_mtp_layers]
        return further + [name for name in names if name.startswith(_MTP) and not self.num_mtp_layers]

    def copies_in_mtp(self, names: Iterable[str]) -> dict[str, str]:
        """Return the given hub names of copies of embedding and head in multi-token-prediction layers.

        Returns:
            `{name of the copy: name of the tensor that it repeats}`.
        """
        own = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        embedding, head = self.embedding, self.embedding if self.is_tied else HEAD
        repeated = {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
        found = {name: name.split(".", 3)[-1] for name, layer in _numbered(names) if layer in own}
        return {name: repeated[suffix] for name, suffix in found.items() if suffix in repeated}

    def derived(self, names: Iterable[str]) -> list[str]:
        """Return the given hub names, found in old files, whose tensors follow from the configuration."""
        return [name for name in names if _DERIVED.search(name)]


def rules_for(hf_config: PretrainedConfig, *, has_scalar_head: bool = False, num_mtp_layers: int = 0) -> Rules:
    """Build the rules of a model.

    Args:
        has_scalar_head: whether an undivided head with one output replaces the head for tokens.
        num_mtp_layers: number of layers for multi-token prediction that are part of the model.

    Raises:
        ConfigError: there are no rules for the family, or the family has no multi-token-prediction layers.
    """
    layers = FAMILIES.get(hf_config.model_type)
    if layers is None:
        raise ConfigError(
            f"Weights of model_type={hf_config.model_type!r} cannot be converted for Megatron Core. Families that can: "
            f"{', '.join(sorted(FAMILIES))}. policy.dtensor_cfg.enabled=true trains others."
        )
    tied = bool(hf_config.tie_word_embeddings) and not has_scalar_head
    head = Rule(OUTPUT, (Part(layers.embedding if tied else HEAD),), dim=0, copy_of_tied=tied)
    if has_scalar_head:
        head = Rule(OUTPUT, (Part(SCALAR_HEAD),))
    rules = [
        Rule("embedding.word_embeddings.weight", (Part(layers.embedding),), dim=0),
        *(rule for number in range(hf_config.num_hidden_layers) for rule in layers.of(hf_config, number)),
        Rule("decoder.final_layernorm.weight", (Part(layers.final_norm),)),
        *(rule for depth in range(num_mtp_layers) for rule in layers.of_mtp(hf_config, depth)),
        head,
    ]
    by_parameter = {rule.parameter: rule for rule in rules}
    counts = hf_config.num_hidden_layers, num_mtp_layers
    return Rules(by_parameter, *counts, layers.embedding, tied, has_scalar_head, layers.layer_prefix)


def _numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the names that belong to a layer, with the layer's number."""
    for name in names:
        found = _LAYER.match(name)
        if found:
            yield name, int(found[1])


def hub_tensors(rules: Rules, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield all hub tensors, made from whole parameters, in model order.

    Args:
        read: reads a parameter by its name, once for each. At most one parameter or one layer's experts are in memory.

    Yields:
        Name, tensor, and whether the tensor keeps its dtype.
    """
    for bundle in rules.bundles():
        if len(bundle) == 1:
            whole = read(bundle[0].parameter)
            for index, part in enumerate(bundle[0].parts):
                yield part.name, bundle[0].joined(index, [whole]), bundle[0].full_precision
            continue
        stack = Tensor()
        for number, rule in enumerate(bundle):
            whole = read(rule.parameter)
            for index, part in enumerate(rule.parts):
                values = rule.joined(index, [whole])
                if number == index == 0:
                    stack = values.new_empty(part.tensor_shape(values.shape, len(bundle)))
                part.of(stack).copy_(values)
        yield bundle[0].parts[0].name, stack, bundle[0].full_precision
