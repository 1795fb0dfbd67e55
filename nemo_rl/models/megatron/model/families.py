"""Translate Hugging Face configurations into fields of Megatron Core, by model family.

The module does not import megatron, so that the controller can refuse a model before any worker starts.
"""

from functools import partial
from typing import Any, ClassVar, override

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.models.huggingface.recurrent import time_step_limits
from nemo_rl.models.megatron.model.family import (
    DeltaNets,
    Family,
    Hybrid,
    LayerTraits,
    Rotary,
    attention_fields,
    decoder_fields,
    require,
    require_choice,
    require_no_biases,
    rotary_of,
    window_fields,
    windowed_layers,
)
from nemo_rl.utils.errors import ConfigError


class Llama(Family):
    """Llama 2 and 3, with any scaling of rotary frequencies that does not depend on the sequence length."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Llama's MLP is gated by silu")
        bias = getattr(hf_config, "attention_bias", False), getattr(hf_config, "mlp_bias", False)
        require(hf_config, "attention_bias", bias[0] == bias[1], "biases are in all linear layers or in none")
        return decoder_fields(hf_config) | {"add_bias_linear": bias[0]}


class Mistral(Family):
    """Mistral 7B and its successors, which have a sliding window in all layers or in none."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Mistral's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        return decoder_fields(hf_config) | window_fields(hf_config.sliding_window, [True] * hf_config.num_hidden_layers)


class Qwen2(Family):
    """Qwen2 and Qwen2.5, which have biases for queries, keys and values."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "mlp_bias")
        windows = window_fields(hf_config.sliding_window, windowed_layers(hf_config))
        return decoder_fields(hf_config) | windows | {"add_qkv_bias": True}


class Qwen3(Family):
    """Qwen3, which normalises the queries and keys of each head."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        windows = window_fields(hf_config.sliding_window, windowed_layers(hf_config))
        return decoder_fields(hf_config) | windows | {"qk_layernorm": True}


class Qwen3Moe(Family):
    """Qwen3-MoE, with a softmax over the chosen experts (`norm_topk_prob`) or over all experts."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        require_choice(hf_config, hf_config.num_experts, normalised=hf_config.norm_topk_prob)
        has_experts = [int(has) for has in qwen_sparse_layers(hf_config)]
        require(hf_config, "mlp_only_layers", any(has_experts), "no layer has experts")
        return (
            decoder_fields(hf_config)
            | window_fields(hf_config.sliding_window, [True] * len(has_experts))
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


class Qwen3Next(Family):
    """Qwen3-Next and Qwen3.5, dense or with experts: gated delta nets, and attention whose output is gated."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "Qwen's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        keys, values = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
        divided = values % keys == 0
        require(hf_config, "linear_num_value_heads", divided, f"the {keys} heads of keys do not divide them")
        return (
            decoder_fields(hf_config)
            | self._experts(hf_config)
            | {
                "qk_layernorm": True,
                "layernorm_zero_centered_gamma": True,
                "attention_output_gate": True,
                "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
                "linear_key_head_dim": hf_config.linear_key_head_dim,
                "linear_value_head_dim": hf_config.linear_value_head_dim,
                "linear_num_key_heads": keys,
                "linear_num_value_heads": values,
            }
        )

    def rotary(self, hf_config: PretrainedConfig) -> Rotary:
        """Return the frequencies of the rotated part of a head."""
        return rotary_of(hf_config, partial_heads=True)

    @override
    def hybrid(self, hf_config: PretrainedConfig) -> DeltaNets:
        kinds = ("linear_attention", "full_attention")
        known = all(kind in kinds for kind in hf_config.layer_types)
        require(hf_config, "layer_types", known, f"layers are {' or '.join(kinds)}")
        return DeltaNets(tuple(kind == "linear_attention" for kind in hf_config.layer_types))

    def _experts(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the fields of experts with a shared expert, whose output is gated. A dense model has none."""
        sparse = qwen_sparse_layers(hf)
        if not any(sparse):
            require(hf, "mlp_only_layers", not getattr(hf, "num_experts", 0), "no layer has experts")
            return {}
        normalised = getattr(hf, "norm_topk_prob", True)
        require_choice(hf, hf.num_experts, normalised=normalised)
        shared = hf.shared_expert_intermediate_size
        require(hf, "shared_expert_intermediate_size", shared > 0, "layers with experts have one for all tokens")
        return {
            "num_moe_experts": hf.num_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [int(has) for has in sparse],
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": True,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not normalised,
        }


def qwen_sparse_layers(hf: PretrainedConfig) -> list[bool]:
    """Return whether each layer of a Qwen model has experts. Models without `decoder_sparse_step` have them in all."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or ()
    require(hf, "decoder_sparse_step", step > 0, "every so many layers have experts")
    some = getattr(hf, "num_experts", 0) > 0
    return [some and layer not in dense and (layer + 1) % step == 0 for layer in range(hf.num_hidden_layers)]


def sparse_layers(hf: PretrainedConfig) -> list[bool]:
    """Return whether each layer of a model with sigmoid routing has experts."""
    kinds = getattr(hf, "mlp_layer_types", None)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    first = getattr(hf, "first_k_dense_replace", 0)
    return [layer >= first for layer in range(hf.num_hidden_layers)]


def _check_sigmoid_router(hf: PretrainedConfig) -> None:
    """Refuse a router of the kind of DeepSeek-V3 that Megatron Core computes otherwise."""
    require(hf, "norm_topk_prob", hf.norm_topk_prob, "the weights of the chosen experts are normalised")
    require(hf, "num_experts_per_tok", hf.num_experts_per_tok > 1, "the weight of one expert is not normalised")
    require_choice(hf, hf.n_routed_experts, normalised=False)
    require(hf, "n_shared_experts", bool(hf.n_shared_experts), "layers with experts have at least one for all tokens")
    each, rest = divmod(hf.n_routed_experts, hf.n_group)
    reason = f"the {hf.n_routed_experts} experts are in groups of equal size, of two at least"
    require(hf, "n_group", rest == 0 and (each > 1 or hf.n_group == 1), reason)
    ratio = hf.num_experts_per_tok // hf.topk_group
    require(
        hf,
        "num_experts_per_tok",
        hf.n_group == 1 or ratio == 2,
        f"a group is scored by its num_experts_per_tok // topk_group = {ratio} best experts, and {hf.model_type} "
        "scores it by two",
    )


def _sigmoid_router(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of experts that are chosen by sigmoids and a correction bias, with shared experts."""
    grouped = {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return (grouped if hf.n_group > 1 else {}) | {
        "num_moe_experts": hf.n_routed_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(sparse) for sparse in sparse_layers(hf)],
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
    }


class DeepseekV3(Family):
    """Latent attention, and experts chosen by groups with a correction bias: DeepSeek-V3, R1, Kimi K2, GLM-4.7-Flash.

    The norms of latents always have the epsilon 1e-6, whatever `rms_norm_eps` is.
    """

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "glm4_moe_lite")
    traits: ClassVar[LayerTraits] = LayerTraits(latent_eps=1e-6)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        self._check(hf_config)
        fields = decoder_fields(hf_config)
        fields.pop("kv_channels")
        return fields | self._attention(hf_config) | self._rotary(hf_config) | _sigmoid_router(hf_config)

    def rotary(self, hf_config: PretrainedConfig) -> Rotary | None:
        """Return None, because the layers have their own rotary embedding."""
        return None

    def _check(self, hf: PretrainedConfig) -> None:
        require(hf, "hidden_act", hf.hidden_act == "silu", "DeepSeek's MLP is gated by silu")
        require_no_biases(hf, "attention_bias", "mlp_bias")
        require(hf, "rope_interleave", hf.rope_interleave, "rotary dimensions are interleaved")
        require(hf, "q_lora_rank", hf.q_lora_rank is not None, "queries without a latent would get a norm")
        require(
            hf, "num_key_value_heads", hf.num_key_value_heads == hf.num_attention_heads, "each head has its own keys"
        )
        _check_sigmoid_router(hf)

    def _attention(self, hf: PretrainedConfig) -> dict[str, Any]:
        return {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
        }

    def _rotary(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the fields of plain or YaRN frequencies (Peng et al. 2023, arXiv:2309.00071).

        YaRN's `mscale` also scales the scores.
        """
        given = hf.rope_parameters
        kind = given.get("rope_type", "default")
        require(hf, "rope_parameters", kind in ("default", "yarn"), f"rope_type={kind} is unknown to latent attention")
        fields = {"rope_type": "rope", "rotary_base": given["rope_theta"], "mscale_all_dim": 0.0}
        if kind == "default":
            return fields
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        require(hf, "rope_parameters", given.get("attention_factor") is None, "attention_factor follows from mscale")
        require(hf, "rope_parameters", given.get("truncate", True), "the range of YaRN is rounded to whole dimensions")
        require(hf, "rope_parameters", bool(mscale) or not all_dim, "mscale_all_dim needs mscale")
        return fields | {
            "rope_type": "yarn",
            "rotary_scaling_factor": given["factor"],
            "original_max_position_embeddings": given["original_max_position_embeddings"],
            "beta_fast": given.get("beta_fast") or 32,
            "beta_slow": given.get("beta_slow") or 1,
            # transformers uses mscale only together with mscale_all_dim.
            "mscale": mscale if all_dim else 1.0,
            "mscale_all_dim": all_dim or 0.0,
        }


class Glm4Moe(Family):
    """GLM-4.5, 4.6 and 4.7, with partially rotated heads and the experts of DeepSeek-V3."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "GLM's MLP is gated by silu")
        require_no_biases(hf_config, "mlp_bias")
        _check_sigmoid_router(hf_config)
        own = {"add_qkv_bias": hf_config.attention_bias, "qk_layernorm": hf_config.use_qk_norm}
        return decoder_fields(hf_config) | _sigmoid_router(hf_config) | own

    def rotary(self, hf_config: PretrainedConfig) -> Rotary:
        """Return the frequencies of the rotated part of a head."""
        return rotary_of(hf_config, partial_heads=True)


class MiniMaxM2(Family):
    """MiniMax-M2, with partially rotated heads and experts in every layer, which are chosen with a correction bias."""

    model_types: ClassVar[tuple[str, ...]] = ("minimax_m2",)
    traits: ClassVar[LayerTraits] = LayerTraits(joint_head_norms=True)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        require(hf_config, "hidden_act", hf_config.hidden_act == "silu", "MiniMax's MLP is gated by silu")
        require_no_biases(hf_config, "attention_bias", "mlp_bias")
        quiet = not hf_config.router_jitter_noise
        require(hf_config, "router_jitter_noise", quiet, "the inputs of routers have no noise")
        require_choice(hf_config, hf_config.num_local_experts, normalised=True)
        return decoder_fields(hf_config) | {
            "qk_layernorm": True,
            "num_moe_experts": hf_config.num_local_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.intermediate_size,
            "moe_layer_freq": [1] * hf_config.num_hidden_layers,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }

    def rotary(self, hf_config: PretrainedConfig) -> Rotary:
        """Return the frequencies of the rotated part of a head."""
        return rotary_of(hf_config, partial_heads=True)


def squared_relu(x: Tensor) -> Tensor:
    """Return `max(x, 0)^2`."""
    return F.relu(x).square()


class NemotronH(Family):
    """Nemotron-H and Nemotron 3, whose layers are Mamba-2, attention without positions, an MLP or experts."""

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    traits: ClassVar[LayerTraits] = LayerTraits(wide_norms=True)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        self._check(hf_config)
        experts = "moe" in hf_config.layers_block_type
        return (
            attention_fields(hf_config)
            | (self._experts(hf_config) if experts else {})
            | {
                "num_layers": hf_config.num_hidden_layers,
                "hidden_size": hf_config.hidden_size,
                "ffn_hidden_size": hf_config.intermediate_size,
                "normalization": "RMSNorm",
                "layernorm_epsilon": hf_config.layer_norm_epsilon,
                "gated_linear_unit": False,
                "activation_func": squared_relu,
                "add_bias_linear": False,
                "hidden_dropout": 0.0,
                "mamba_state_dim": hf_config.ssm_state_size,
                "mamba_head_dim": hf_config.mamba_head_dim,
                "mamba_num_groups": hf_config.n_groups,
                "mamba_num_heads": hf_config.mamba_num_heads,
            }
        )

    @override
    def model_arguments(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        return super().model_arguments(hf_config) | {"position_embedding_type": "none"}

    def rotary(self, hf_config: PretrainedConfig) -> Rotary | None:
        """Return None, because attention has no positions."""
        return None

    @override
    def hybrid(self, hf_config: PretrainedConfig) -> Hybrid:
        steps = time_step_limits(hf_config)
        return Hybrid(tuple(hf_config.layers_block_type), hf_config.conv_kernel, hf_config.chunk_size, steps)

    def _check(self, hf: PretrainedConfig) -> None:
        require(hf, "mlp_hidden_act", hf.mlp_hidden_act == "relu2", "the MLP squares a ReLU")
        require(hf, "mamba_hidden_act", hf.mamba_hidden_act == "silu", "Mamba-2 layers have the activation silu")
        require_no_biases(hf, "mlp_bias", "use_bias")
        require(hf, "use_conv_bias", hf.use_conv_bias, "convolutions have biases")
        require(hf, "residual_in_fp32", not hf.residual_in_fp32, "sums of layers have the dtype of the weights")
        require(hf, "sliding_window", hf.sliding_window is None, "attention sees all earlier tokens")
        divided = hf.mamba_num_heads % hf.n_groups == 0
        require(hf, "n_groups", divided, f"they do not divide the {hf.mamba_num_heads} heads of Mamba-2 layers")

    def _experts(self, hf: PretrainedConfig) -> dict[str, Any]:
        _check_sigmoid_router(hf)
        reason = "projections of experts to a latent space need Transformer Engine and are not converted"
        require(hf, "moe_latent_size", hf.moe_latent_size is None, reason)
        return _sigmoid_router(hf) | {
            "moe_layer_freq": [int(kind == "moe") for kind in hf.layers_block_type],
            "moe_shared_expert_intermediate_size": hf.moe_shared_expert_intermediate_size,
        }


_gelu = partial(F.gelu, approximate="tanh")


class Gemma3(Family):
    """Text models of Gemma 3, and the text part of its other models if it is saved as `gemma3_text`."""

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
        """Return the frequencies of windowed layers and of all other layers."""
        both = [rotary_of(hf_config, layer_type) for layer_type in ("sliding_attention", "full_attention")]
        unscaled = all(rotary.scaling == 1.0 for rotary in both)
        require(hf_config, "rope_parameters", unscaled, "sine and cosine are not scaled")
        return Rotary(torch.cat([rotary.frequencies for rotary in both]))

    def embedding_scale(self, hf_config: PretrainedConfig) -> float:
        """Return `sqrt(hidden_size)`."""
        return float(hf_config.hidden_size**0.5)


_GAIN = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(1.702 * x)`."""
    return x * torch.sigmoid(_GAIN * x)


class GptOss(Family):
    """GPT-OSS, whose MLP limits gate from above and `up` on both sides, and adds 1 to `up` before gating."""

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


FAMILIES: tuple[Family, ...] = (
    *(Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3Moe(), Qwen3Next()),
    *(DeepseekV3(), Glm4Moe(), MiniMaxM2(), NemotronH(), Gemma3(), GptOss()),
)
MODEL_TYPES = tuple(sorted(name for family in FAMILIES for name in family.model_types))
"""Supported values of `model_type` in `config.json`. `conversion.rules` has rules for each value."""


_TEXT_PARTS = ("qwen3_5", "qwen3_5_moe")
"""Values of `model_type` of checkpoints for images whose text model is trained alone, as in transformers."""


def text_part(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text model that transformers loads from these files.

    Checkpoints of Qwen3.5 also have a vision tower, and transformers has a language model that leaves it out. For all
    other models, the configuration itself is returned.
    """
    if hf_config.model_type not in _TEXT_PARTS:
        return hf_config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS

    text = hf_config.get_text_config()
    text.architectures = [LANGUAGE_MODELS[text.model_type]]
    return text


def family_of(hf_config: PretrainedConfig) -> Family:
    """Return the family of a model.

    Args:
        hf_config: Hugging Face configuration of the model.

    Raises:
        ConfigError: no family supports its `model_type`.
    """
    known = {name: family for family in FAMILIES for name in family.model_types}
    if hf_config.model_type not in known:
        raise ConfigError(
            f"the Megatron backend does not know model_type={hf_config.model_type}; it knows "
            f"{', '.join(MODEL_TYPES)}. Train this model with policy.dtensor_cfg.enabled=true and "
            "policy.megatron_cfg.enabled=false."
        )
    return known[hf_config.model_type]
