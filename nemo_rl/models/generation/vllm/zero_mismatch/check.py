"""Refuse models and settings with which vLLM's log-probabilities are not proven to have the trainer's bits.

This module does not import vLLM, because it runs in the driver.
"""

from collections.abc import Iterator
from typing import Any

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.registry import vllm_arguments
from nemo_rl.utils.errors import ConfigError

PROVEN_TYPES = ("gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types of which `tests/unit/models/generation/test_zero_mismatch.py` compares all log-probabilities."""
PROVEN_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings that are compared there."""
_PROVEN_VALUES = {
    **dict.fromkeys(("attention_backend", "compilation_config", "logits_processors", "quantization")),
    "speculative_config": None,
    "logprobs_mode": "processed_logprobs",
}
"""Arguments of vLLM that select operations which `operations` does not replace, and their proven values."""


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
    otherwise = "or set policy.generation.backend=hf."
    if model.model_type not in PROVEN_TYPES:
        yield (
            f"policy.model_name={policy.model_name!r} is a model of type {model.model_type}, and only "
            f"{', '.join(PROVEN_TYPES)} are proven. Set policy.generation.backend=hf."
        )
    unproven = sorted(set(rotations_of(model)) - set(PROVEN_ROTATIONS))
    if unproven:
        yield (
            f"policy.model_name={policy.model_name!r} has rotary embeddings of type {', '.join(unproven)}, and only "
            f"{', '.join(PROVEN_ROTATIONS)} are proven. Set policy.generation.backend=hf."
        )
    generation = policy.sampling
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


def rotations_of(model: Any) -> list[str]:
    """Return the types of a model's rotary embeddings."""
    given = getattr(model, "rope_parameters", None) or {}
    parts = [part for part in given.values() if isinstance(part, dict)] or [given]
    return [part.get("rope_type", "default") for part in parts]
