"""Llama, Mistral, Qwen2 and Qwen3, which differ in biases, norms of queries and keys, and windows."""

from typing import Any, ClassVar, override

from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import (
    Family,
    decoder_fields,
    require,
    require_no_biases,
    window_fields,
    windowed_layers,
)


class Llama(Family):
    """Llama 2 and 3, with any scaling of the rotary frequencies that does not depend on the sequence length."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Llama's MLP is gated by silu")
        bias = getattr(hf_config, "attention_bias", False), getattr(hf_config, "mlp_bias", False)
        require(hf_config, "attention_bias", bias[0] == bias[1], "biases are in all linear layers or in none")
        return decoder_fields(hf_config) | {"add_bias_linear": bias[0]}


class Mistral(Family):
    """Mistral 7B and its successors; a window, if any, is in all layers."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Mistral's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        return decoder_fields(hf_config) | window_fields(hf_config.sliding_window, [True] * hf_config.num_hidden_layers)


class Qwen2(Family):
    """Qwen2 and Qwen2.5: biases of queries, keys and values."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "mlp_bias")
        windows = window_fields(hf_config.sliding_window, windowed_layers(hf_config))
        return decoder_fields(hf_config) | windows | {"add_qkv_bias": True}


class Qwen3(Family):
    """Qwen3: norms of each head's queries and keys."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        windows = window_fields(hf_config.sliding_window, windowed_layers(hf_config))
        return decoder_fields(hf_config) | windows | {"qk_layernorm": True}
