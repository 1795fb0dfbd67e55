"""Define what a family of models tells Megatron Core, and translate the fields that most families share.

The module does not import megatron. Invariant: a model that Megatron Core cannot express is never approximated. An
error names the field of the configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.models.huggingface.sizes import head_size
from nemo_rl.utils.errors import ConfigError

_SCALED_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerTraits:
    """Traits of a family's layers that Megatron Core's configuration cannot express."""

    output_norms: bool = False
    """Whether outputs of attention and MLP are normalised before they are added to the residual stream."""
    two_rotaries: bool = False
    """Whether layers with a sliding window have other rotary frequencies than layers without one."""
    joint_head_norms: bool = False
    """Whether queries, and keys, are normalised over all heads together instead of each head alone."""
    wide_norms: bool = False
    """Whether norms round after the product with their weight, and not before it."""
    latent_eps: float | None = None
    """Epsilon of the norms of latents, if it is not that of the other norms."""


@dataclass(frozen=True)
class Hybrid:
    """Layers with one norm and one block each, of which some are Mamba-2 blocks."""

    kinds: tuple[str, ...]
    """Block of each layer: linear_attention (Mamba-2), full_attention, mlp or moe."""
    window: int
    """Number of tokens of the convolution."""
    chunk: int
    """Number of tokens that the scan computes together."""
    steps: tuple[float, float]
    """Smallest and largest time step."""


@dataclass(frozen=True)
class DeltaNets:
    """Layers with an MLP, of which some have a gated delta net in the place of attention."""

    places: tuple[bool, ...]
    """Whether each layer has a gated delta net."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding."""

    frequencies: Tensor
    """`[R / 2]` float32, radians per token, for the first R numbers of a head. `[R]` if layers differ, with the
    frequencies of windowed layers first."""
    scaling: float = 1.0
    """Factor of sine and cosine."""


class Family:
    """Interface that translates the configurations of models with a common architecture."""

    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in transformers."""
    traits: ClassVar[LayerTraits] = LayerTraits()

    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        """Return the fields of `TransformerConfig`, or `MLATransformerConfig`, that the architecture fixes.

        Raises:
            ConfigError: Megatron Core cannot express the model; the message names the field and the reason.
        """
        raise NotImplementedError

    def model_arguments(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of `GPTModel` that the architecture fixes."""
        return {
            "vocab_size": hf_config.vocab_size,
            "max_sequence_length": hf_config.max_position_embeddings,
            "share_embeddings_and_output_weights": hf_config.tie_word_embeddings,
            "position_embedding_type": "rope",
        }

    def rotary(self, hf_config: PretrainedConfig) -> Rotary | None:
        """Return the model's rotary embedding, or None if the layers have their own."""
        return rotary_of(hf_config)

    def embedding_scale(self, hf_config: PretrainedConfig) -> float | None:
        """Return the factor of the token embeddings, or None if there is none."""
        return None

    def hybrid(self, hf_config: PretrainedConfig) -> Hybrid | DeltaNets | None:
        """Return the blocks of the layers, or None if every layer has attention and an MLP."""
        return None


def decoder_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a decoder with RMS norms, gated MLPs and grouped-query attention."""
    return attention_fields(hf_config) | {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": getattr(hf_config, "intermediate_size", None) or hf_config.moe_intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def attention_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of grouped-query attention."""
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    require(hf_config, "num_key_value_heads", heads % groups == 0, f"they do not divide the {heads} heads of queries")
    return {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_size(hf_config),
        "attention_dropout": hf_config.attention_dropout,
    }


def window_fields(window: int | None, windowed: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of sliding windows.

    Args:
        window: number of keys that a query sees, including the key of its own token; None if it sees all.
        windowed: whether each layer has the window.
    """
    if window is None or not any(windowed):
        return {}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(one) for one in windowed]}


def windowed_layers(hf_config: PretrainedConfig) -> list[bool]:
    """Return whether each layer of a model with `layer_types` has a sliding window."""
    require(
        hf_config,
        "layer_types",
        all(kind in ("sliding_attention", "full_attention") for kind in hf_config.layer_types),
        "only full and sliding attention are known",
    )
    windowed = [kind == "sliding_attention" for kind in hf_config.layer_types]
    sized = hf_config.sliding_window is not None or not any(windowed)
    require(hf_config, "sliding_window", sized, "layer_types has layers with a window, and it has no size")
    return windowed


def require_choice(hf_config: PretrainedConfig, experts: int, *, normalised: bool) -> None:
    """Refuse a number of experts per token that the router cannot choose or that prevents its training.

    Args:
        hf_config: Hugging Face configuration of the model.
        experts: number of experts in each layer with experts.
        normalised: whether the weights are a softmax over the chosen experts, which is constant for one expert.

    Raises:
        ConfigError: the number of chosen experts is not possible, or the router would not be trained.
    """
    chosen = hf_config.num_experts_per_tok
    require(hf_config, "num_experts_per_tok", 1 <= chosen <= experts, f"each layer has {experts} experts")
    reason = "the weight of one chosen expert is always 1, so its router has no gradient"
    require(hf_config, "num_experts_per_tok", chosen > 1 or not normalised, reason)


def require_no_biases(hf_config: PretrainedConfig, *fields: str) -> None:
    """Refuse fields that enable biases which a family does not have.

    Raises:
        ConfigError: one of the fields is set.
    """
    for field in fields:
        require(hf_config, field, not getattr(hf_config, field, False), "these layers have no biases")


def rotary_of(hf_config: PretrainedConfig, layer_type: str | None = None, *, partial_heads: bool = False) -> Rotary:
    """Return the rotary frequencies as transformers computes them. Megatron Core has fixed constants for some scalings.

    Args:
        hf_config: Hugging Face configuration of the model.
        layer_type: type of the layers, if frequencies differ by type.
        partial_heads: whether the architecture can rotate only the first numbers of each head
            (`partial_rotary_factor`).

    Raises:
        ConfigError: the frequencies depend on the length of a sequence, or their type is unknown.
    """
    parameters = hf_config.rope_parameters if layer_type is None else hf_config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    where = "rope_parameters" if layer_type is None else f"rope_parameters.{layer_type}"
    why = "frequencies would depend on each sequence's length" if kind in _SCALED_BY_LENGTH else "it is unknown"
    require(hf_config, where, kind in ("default", "linear", "llama3", "yarn"), f"rope_type={kind}: {why}")
    share = parameters.get("partial_rotary_factor", 1.0)
    require(hf_config, where, partial_heads or share == 1.0, "all of a head is rotated")
    width = int(head_size(hf_config) * share)
    require(
        hf_config, "head_dim", width > 0 and width % 2 == 0, f"{width} numbers of a head cannot be rotated in pairs"
    )
    if kind == "default":
        return Rotary(1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"), layer_type=layer_type)
    return Rotary(frequencies, scaling)


def require(hf_config: PretrainedConfig, field: str, holds: bool, reason: str) -> None:
    """Refuse a model because of a field of its configuration, if a condition is false.

    Raises:
        ConfigError: the condition is false; the message names the field and the reason.
    """
    if not holds:
        value = getattr(hf_config, field, None)
        given = f"{field}={value!r}" if value is not None else field
        raise ConfigError(
            f"Megatron Core cannot express this {hf_config.model_type} model: {given}. {reason}. "
            "Train it with policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false."
        )
