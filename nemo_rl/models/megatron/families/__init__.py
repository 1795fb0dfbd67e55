"""Model families of the Megatron backend, which translate Hugging Face configurations for Megatron Core."""

from transformers import PretrainedConfig

from nemo_rl.models.megatron.families.base import Family, LayerTraits, Rotary
from nemo_rl.models.megatron.families.deepseek_v3 import DeepseekV3
from nemo_rl.models.megatron.families.dense import Llama, Mistral, Qwen2, Qwen3
from nemo_rl.models.megatron.families.gemma3 import Gemma3
from nemo_rl.models.megatron.families.gpt_oss import GptOss
from nemo_rl.models.megatron.families.qwen3_moe import Qwen3Moe
from nemo_rl.utils.errors import ConfigError

__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "LayerTraits", "Rotary", "family_of"]

FAMILIES: tuple[Family, ...] = (Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3Moe(), DeepseekV3(), Gemma3(), GptOss())
MODEL_TYPES = tuple(sorted(name for family in FAMILIES for name in family.model_types))
"""Supported values of `model_type` in `config.json`; each also has conversion rules (`conversion.layer_rules`)."""


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
