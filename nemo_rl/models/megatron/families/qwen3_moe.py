"""Qwen3-MoE: Qwen3 with experts in some layers."""

from typing import Any, ClassVar, override

from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import (
    Family,
    decoder_fields,
    require,
    require_choice,
    require_no_biases,
    window_fields,
)


class Qwen3Moe(Family):
    """Qwen3-MoE, with a softmax over the chosen experts (`norm_topk_prob`) or over all experts before the choice."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        require(
            hf_config, "decoder_sparse_step", hf_config.decoder_sparse_step > 0, "every so many layers have experts"
        )
        require_choice(hf_config, hf_config.num_experts, normalised=hf_config.norm_topk_prob)
        layers = range(hf_config.num_hidden_layers)
        step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers
        has_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
        require(hf_config, "mlp_only_layers", any(has_experts), "no layer has experts")
        return (
            decoder_fields(hf_config)
            | window_fields(hf_config.sliding_window, [True] * len(layers))
            | {
                "qk_layernorm": True,
                "num_moe_experts": hf_config.num_experts,
                "moe_router_topk": hf_config.num_experts_per_tok,
                "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
                "moe_layer_freq": has_experts,
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            }
        )
