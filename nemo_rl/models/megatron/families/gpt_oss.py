"""GPT-OSS, with biases and a clamped gate in experts, attention sinks, and a window in some layers."""

from typing import Any, ClassVar, override

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import (
    Family,
    decoder_fields,
    require,
    require_choice,
    window_fields,
    windowed_layers,
)

_GAIN = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(1.702 * x)`."""
    return x * torch.sigmoid(_GAIN * x)


class GptOss(Family):
    """GPT-OSS; in its MLP the gate is clamped above, `up` on both sides, and 1 is added to `up` before gating."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "attention_bias", hf_config.attention_bias, "biases are in all linear layers or in none")
        require(hf_config, "swiglu_alpha", hf_config.swiglu_alpha == _GAIN, f"the gain of the gate is {_GAIN}")
        require_choice(hf_config, hf_config.num_local_experts, normalised=True)
        return (
            decoder_fields(hf_config)
            | window_fields(hf_config.sliding_window, windowed_layers(hf_config))
            | {
                "add_bias_linear": True,
                "softmax_type": "learnable",
                "activation_func": quick_gelu,
                "glu_linear_offset": 1.0,
                "activation_func_clamp_value": hf_config.swiglu_limit,
                "num_moe_experts": hf_config.num_local_experts,
                "moe_router_topk": hf_config.num_experts_per_tok,
                "moe_ffn_hidden_size": hf_config.intermediate_size,
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": False,
            }
        )
