"""Refuse models and settings with which vLLM's log-probabilities are not proven to have the trainer's bits.

This module does not import vLLM, because it runs in the driver.
"""

from collections.abc import Iterator
from typing import Any

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.registry import vllm_arguments
from nemo_rl.models.huggingface.probe_model import EXPERTS
from nemo_rl.utils.errors import ConfigError

OWN_TYPES = ("gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types that vLLM computes with its own class, with operations of the trainer (`operations`)."""
TYPES_OF_TRANSFORMERS = (
    *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4_moe", "glm4_moe_lite", "gpt_neox"),
    *("gpt_oss", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "minimax_m2", "ministral", "ministral3"),
    *("mixtral", "olmo", "olmo2", "olmo3", "olmoe", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "solar_open"),
    *("starcoder2", "vaultgemma"),
)
"""Model types that vLLM computes with the modules of transformers (`trainer_modules`)."""
PROVEN_TYPES = tuple(sorted((*OWN_TYPES, *TYPES_OF_TRANSFORMERS)))
"""Model types of which `tests/unit/models/generation/test_zero_mismatch.py` compares all log-probabilities."""
PROVEN_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings that are compared there."""
_PROVEN_VALUES = {
    **dict.fromkeys(("attention_backend", "compilation_config", "logits_processors", "model_impl", "quantization")),
    "speculative_config": None,
    "logprobs_mode": "processed_logprobs",
}
"""Arguments of vLLM that select operations which `operations` does not replace, and their proven values."""

_HF = "set policy.generation.backend=hf."
_ONLY_HF = "Set policy.generation.backend=hf."


def require_same_bits(policy: PolicyConfig, model: Any) -> None:
    """Check that vLLM can compute a model as the trainer does, if `policy.zero_mismatch` asks for it.

    Args:
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: The model or a setting is not proven. The message names it.
    """
    problems = list(_problems(policy, model)) if policy.zero_mismatch else []
    if problems:
        raise ConfigError("\n".join(f"policy.zero_mismatch=true with vLLM: {problem}" for problem in problems))


def _problems(policy: PolicyConfig, model: Any) -> Iterator[str]:
    yield from _unproven_model(policy, model)
    yield from _unproven_experts(policy, model)
    generation, otherwise = policy.sampling, f"or {_HF}"
    if generation.top_p != 1.0 or generation.top_k not in (None, -1, 0):
        yield (
            f"policy.generation.top_p={generation.top_p:g} and top_k={generation.top_k} filter tokens, and vLLM's "
            f"filters are not proven. Set top_p=1.0 and top_k=null, {otherwise}"
        )
    if generation.engine.kv_cache_dtype != "auto":
        yield (
            f"policy.generation.vllm_cfg.kv_cache_dtype={generation.engine.kv_cache_dtype} rounds keys and values. Set "
            f"it to auto, {otherwise}"
        )
    for name, proven in _PROVEN_VALUES.items():
        if vllm_arguments(policy).get(name, proven) not in (None, proven):
            yield f"policy.generation.vllm_kwargs.{name} selects other operations of vLLM. Leave it out, {otherwise}"


def _unproven_model(policy: PolicyConfig, model: Any) -> Iterator[str]:
    """Yield messages about a type, rotary embeddings, formats and divisions of a model that are not proven."""
    named, kind = f"policy.model_name={policy.model_name!r}", model.model_type
    if kind not in PROVEN_TYPES:
        yield f"{named} is a model of type {kind}, and only {', '.join(PROVEN_TYPES)} are proven. {_ONLY_HF}"
    unproven = sorted(set(rotations_of(model)) - set(PROVEN_ROTATIONS))
    if unproven:
        yield (
            f"{named} has rotary embeddings of type {', '.join(unproven)}, and only {', '.join(PROVEN_ROTATIONS)} are "
            f"proven. {_ONLY_HF}"
        )
    if getattr(model, "quantization_config", None):
        yield f"{named} has quantized weights (quantization_config), whose products are not proven. {_ONLY_HF}"
    ranks = policy.dtensor_cfg.tensor_parallel_size
    if ranks > 1 and kind in TYPES_OF_TRANSFORMERS:
        yield (
            f"{named} is a model of type {kind}, which is proven with undivided layers of the policy only, and "
            f"policy.dtensor_cfg.tensor_parallel_size={ranks}. Set it to 1, or {_HF}"
        )


def _unproven_experts(policy: PolicyConfig, model: Any) -> Iterator[str]:
    """Yield messages about experts that vLLM would compute otherwise than the trainer."""
    named = f"policy.model_name={policy.model_name!r}"
    if not any(getattr(model, name, None) for name in EXPERTS):
        return
    if getattr(model, "hidden_act", "silu") != "silu":
        yield f"{named} has experts with hidden_act={model.hidden_act}, and vLLM computes silu. {_ONLY_HF}"
    if model._experts_implementation == "eager":
        yield (
            f"{named} has experts of sizes that are no multiples of 8, which the trainer adds in another order. "
            f"{_ONLY_HF}"
        )


def rotations_of(model: Any) -> list[str]:
    """Return the types of a model's rotary embeddings."""
    given = getattr(model, "rope_parameters", None) or {}
    parts = [part for part in given.values() if isinstance(part, dict)] or [given]
    return [part.get("rope_type", "default") for part in parts]
