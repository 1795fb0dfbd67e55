"""Choose the layer specification of a model: that of Transformer Engine or a portable one.

Invariant: all layers of a model use the same specification. Both have the same parameters. If Transformer Engine fuses
a norm into the next linear layer, the norm's weight has another name (`conversion` handles both).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemo_rl.models.megatron.model.delta_net import delta_net_spec
from nemo_rl.models.megatron.model.family import DeltaNets, Hybrid, LayerTraits
from nemo_rl.models.megatron.model.layers import (
    ExpertRowParallelLinear,
    JointlyNormedAttention,
    PortableAttention,
    PortableLatentAttention,
    RMSNorm,
    TwoRotaryAttention,
    WideRMSNorm,
    with_output_norm,
)
from nemo_rl.models.megatron.model.mamba import mamba_spec

__all__ = ["HAVE_TE", "choose_spec", "mtp_spec"]

_NORM_NAME = "input_layernorm."
"""Prefix of the norm before attention in `sharded_state_dict_keys_map`."""


def choose_spec(
    config: TransformerConfig,
    traits: LayerTraits,
    vp_stage: int | None,
    *,
    hybrid: Hybrid | DeltaNets | None = None,
    separate_norms: bool = False,
) -> TransformerBlockSubmodules:
    """Build the specification of one pipeline stage's layers.

    Args:
        config: configuration of the model; `transformer_impl` selects the specification.
        vp_stage: number of the virtual stage; None without virtual stages.
        hybrid: blocks of the layers, if they are not all attention and an MLP.
        separate_norms: do not fuse norms into the following linear layers, whose inputs adapters need.
    """
    engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    norm = TENorm if engine else WideRMSNorm if traits.wide_norms else RMSNorm
    layers = {id(spec.submodules): spec.submodules for spec in block.layer_specs}.values()
    for layer in layers:
        if not engine:
            _make_portable(layer, norm)
        elif separate_norms:
            _separate_norms(layer, TENorm, TELayerNormColumnParallelLinear, TEColumnParallelLinear)
        _give(layer, traits, norm)
    if not engine:
        block.layer_norm = norm
    if hybrid is not None:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        stage = slice(first, first + len(block.layer_specs))
        block.layer_specs = _with_states(block.layer_specs, hybrid, stage, engine, norm)
    return block


def _with_states(
    specs: Sequence[ModuleSpec], hybrid: Hybrid | DeltaNets, stage: slice, engine: bool, norm: Any
) -> list[ModuleSpec]:
    """Return the specifications of layers of which some carry a state from token to token.

    Args:
        specs: layers with attention and an MLP.
        stage: the layers of the stage among those of the model.
        engine: whether linear layers are those of Transformer Engine.
        norm: class of the norms before blocks.
    """
    if isinstance(hybrid, Hybrid):
        mamba, kinds = mamba_spec(hybrid, engine), hybrid.kinds[stage]
        return [_with_one_block(spec, kind, mamba, norm) for spec, kind in zip(specs, kinds, strict=True)]
    delta_net, places = delta_net_spec(engine), hybrid.places[stage]
    return [_with_mixer(spec, delta_net, norm) if has else spec for spec, has in zip(specs, places, strict=True)]


def _with_mixer(spec: ModuleSpec, mixer: ModuleSpec, norm: Any) -> ModuleSpec:
    """Return the specification of a layer with another block in the place of attention."""
    layer = spec.submodules
    # # Checkpoints have the norm's own name, as there is no layer into which Transformer Engine would fuse it.
    names = {name: stored for name, stored in layer.sharded_state_dict_keys_map.items() if name != _NORM_NAME}
    own = {"input_layernorm": norm, "self_attention": mixer, "sharded_state_dict_keys_map": names}
    return replace(spec, submodules=replace(layer, **own))


def _with_one_block(spec: ModuleSpec, kind: str, mamba: ModuleSpec, norm: Any) -> ModuleSpec:
    """Return the specification of a layer that has only one of its blocks, or a Mamba-2 block.

    Args:
        spec: a layer with attention and an MLP.
        kind: block of the layer, as in `Hybrid.kinds`.
        mamba: specification of a Mamba-2 block.
        norm: class of the norm before it.
    """
    if kind in ("mlp", "moe"):
        none = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    else:
        none = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    spec = replace(spec, submodules=replace(spec.submodules, **none))
    return _with_mixer(spec, mamba, norm) if kind == "linear_attention" else spec


def mtp_spec(
    config: TransformerConfig,
    traits: LayerTraits,
    layers: TransformerBlockSubmodules,
    vp_stage: int | None,
    *,
    hybrid: bool = False,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Build the specification of the stage's multi-token-prediction layers. Return None if it has no such layers.

    Args:
        config: configuration of the model.
        traits: traits of its layers.
        layers: specification of the stage's layers; multi-token-prediction layers repeat the last one.
        vp_stage: number of the virtual stage; None without virtual stages.
        hybrid: whether layers differ. Those for multi-token prediction then have attention, and experts if any layer
            has experts.
    """
    if not config.mtp_num_layers:
        return None
    engine = config.transformer_impl == "transformer_engine"
    if hybrid:
        alike = copy(config)
        alike.moe_layer_freq = 1
        layers = choose_spec(alike, traits, vp_stage)
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=vp_stage)
    if block is not None and not engine:
        for spec in block.layer_specs:
            norms = spec.submodules
            norms.enorm = norms.hnorm = norms.layer_norm = WideRMSNorm if traits.wide_norms else RMSNorm
    return block


def _make_portable(layer: Any, norm: Any) -> None:
    """Replace modules that do not support sequence parallelism, packed rows or context parallelism."""
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention: ModuleSpec = layer.self_attention
    if attention.module is MLASelfAttention:
        attention.module = PortableLatentAttention
    attention.submodules.core_attention = PortableAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention.submodules, name, IdentityOp) not in (None, IdentityOp):
            setattr(attention.submodules, name, RMSNorm)
    experts = getattr(layer.mlp.keywords["submodules"], "experts", None)
    if experts is not None:
        experts.keywords["submodules"].linear_fc2 = ExpertRowParallelLinear


_NORMS_OF = {"linear_q_up_proj": "q_layernorm", "linear_kv_up_proj": "kv_layernorm"}
"""Name of each norm in attention, by the name of the linear layer that follows it."""


def _separate_norms(layer: Any, norm: Any, fused: Any, linear: Any) -> None:
    """Replace each linear layer with a fused norm by a separate norm and a plain linear layer."""
    attention = layer.self_attention.submodules
    if getattr(attention, "linear_qkv", None) is fused:
        attention.linear_qkv, layer.input_layernorm = linear, norm
    for name, norm_name in _NORMS_OF.items():
        if getattr(attention, name, None) is fused:
            setattr(attention, name, linear)
            setattr(attention, norm_name, norm)
    mlp = layer.mlp.keywords["submodules"]
    if getattr(mlp, "linear_fc1", None) is fused:
        mlp.linear_fc1, layer.pre_mlp_layernorm = linear, norm


def _give(layer: Any, traits: LayerTraits, norm: Any) -> None:
    attention: ModuleSpec = layer.self_attention
    if traits.two_rotaries:
        attention.module = TwoRotaryAttention
    if traits.joint_head_norms:
        attention.module = JointlyNormedAttention
    if traits.output_norms:
        attention.submodules.linear_proj = with_output_norm(attention.submodules.linear_proj, norm)
        mlp = layer.mlp.keywords["submodules"]
        mlp.linear_fc2 = with_output_norm(mlp.linear_fc2, norm)
