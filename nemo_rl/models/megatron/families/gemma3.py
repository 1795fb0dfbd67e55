"""Gemma 3 (text), with norms before and after attention and MLP, and two sets of rotary frequencies."""

from functools import partial
from typing import Any, ClassVar, override

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import (
    Family,
    LayerTraits,
    Rotary,
    decoder_fields,
    require,
    require_no_biases,
    rotary_of,
    window_fields,
    windowed_layers,
)

_gelu = partial(F.gelu, approximate="tanh")


class Gemma3(Family):
    """Text models of Gemma 3, and the text part of other models if it is saved as `gemma3_text`."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    traits: ClassVar[LayerTraits] = LayerTraits(output_norms=True, two_rotaries=True)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        gelu = hf_config.hidden_activation == "gelu_pytorch_tanh"
        require(hf_config, "hidden_activation", gelu, "Gemma's MLP is gated by gelu_pytorch_tanh")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        causal = not hf_config.use_bidirectional_attention
        require(hf_config, "use_bidirectional_attention", causal, "attention is causal")
        capped = hf_config.final_logit_softcapping is not None
        require(hf_config, "final_logit_softcapping", not capped, "logits are not capped")
        return (
            decoder_fields(hf_config)
            | window_fields(hf_config.sliding_window, windowed_layers(hf_config))
            | {
                "activation_func": _gelu,
                "qk_layernorm": True,
                "layernorm_zero_centered_gamma": True,
                "softmax_scale": hf_config.query_pre_attn_scalar**-0.5,
            }
        )

    def rotary(self, hf_config: PretrainedConfig) -> Rotary:
        """Return the frequencies of windowed layers and of the other layers."""
        both = [rotary_of(hf_config, layer_type) for layer_type in ("sliding_attention", "full_attention")]
        unscaled = all(rotary.scaling == 1.0 for rotary in both)
        require(hf_config, "rope_parameters", unscaled, "sine and cosine are not scaled")
        return Rotary(torch.cat([rotary.frequencies for rotary in both]))

    def embedding_scale(self, hf_config: PretrainedConfig) -> float:
        """Return `sqrt(hidden_size)`."""
        return float(hf_config.hidden_size**0.5)
