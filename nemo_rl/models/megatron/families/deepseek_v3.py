"""DeepSeek-V3: multi-head latent attention, and experts chosen by groups with a correction bias."""

from typing import Any, ClassVar, override

from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import (
    Family,
    Rotary,
    decoder_fields,
    require,
    require_choice,
    require_no_biases,
)

_EPS_OF_LATENT_NORMS = 1e-6


class DeepseekV3(Family):
    """DeepSeek-V3 and R1; heads for multi-token prediction are not part of the model that is trained."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)

    @override
    def transformer_fields(self, hf_config: PretrainedConfig) -> dict[str, Any]:
        self._check(hf_config)
        fields = decoder_fields(hf_config)
        fields.pop("kv_channels")
        return fields | self._attention(hf_config) | self._rotary(hf_config) | self._experts(hf_config)

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
        require(
            hf,
            "rms_norm_eps",
            hf.rms_norm_eps == _EPS_OF_LATENT_NORMS,
            f"the norms of the latents have eps {_EPS_OF_LATENT_NORMS}, and all norms share one",
        )
        require(hf, "norm_topk_prob", hf.norm_topk_prob, "the weights of the chosen experts are normalised")
        require(hf, "num_experts_per_tok", hf.num_experts_per_tok > 1, "the weight of one expert is not normalised")
        require_choice(hf, hf.n_routed_experts, normalised=False)
        require(
            hf, "n_shared_experts", bool(hf.n_shared_experts), "layers with experts have at least one for all tokens"
        )
        each, rest = divmod(hf.n_routed_experts, hf.n_group)
        reason = f"the {hf.n_routed_experts} experts are in groups of equal size, of two at least"
        require(hf, "n_group", rest == 0 and (each > 1 or hf.n_group == 1), reason)
        ratio = hf.num_experts_per_tok // hf.topk_group
        require(
            hf,
            "num_experts_per_tok",
            hf.n_group == 1 or ratio == 2,
            f"a group is scored by its num_experts_per_tok // topk_group = {ratio} best experts, and DeepSeek-V3 "
            "scores it by two",
        )

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

    def _experts(self, hf: PretrainedConfig) -> dict[str, Any]:
        groups = (
            {}
            if hf.n_group == 1
            else {
                "moe_router_num_groups": hf.n_group,
                "moe_router_group_topk": hf.topk_group,
            }
        )
        return groups | {
            "num_moe_experts": hf.n_routed_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)],
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * (hf.n_shared_experts or 0) or None,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }
