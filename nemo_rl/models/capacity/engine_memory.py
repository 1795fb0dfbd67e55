"""Predict the memory of one rank of an engine from the model's configuration.

As in vLLM (`vllm.v1.worker.gpu_worker.Worker.determine_available_memory`), the key-value cache takes the part of the
engine's share of the device that weights and workspace leave. Invariant: bytes are those of one rank.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import GenerationConfig
from nemo_rl.models.huggingface.sizes import head_size, parameter_shapes
from nemo_rl.models.quantization.weights import WeightQuantization

_BATCHED_TOKENS, _SEQUENCES = 16384, 1024
"""Most tokens and sequences in one step of vLLM on devices of at least 70 GiB (`EngineArgs.get_batch_defaults`)."""
_WITHOUT_CACHE = ("linear_attention", "conv", "mamba")


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine."""

    weights: float
    """Bytes of its part of the model."""
    workspace: float
    """Estimated bytes of activations and logits of the largest step."""
    cache_per_token: float
    """Bytes of the keys and values of one token."""


def engine_memory(
    model: PretrainedConfig,
    generation: GenerationConfig,
    itemsize: int,
    quantization: WeightQuantization | None = None,
) -> EngineMemory:
    """Predict the memory of a rank of the engines that a section describes.

    Args:
        model: configuration of the model.
        generation: the section.
        itemsize: bytes of a number in the engine; those of a float8 cache have one.
        quantization: weights that the engine holds in float8; None: no weights.
    """
    engine, text = generation.engine, model.get_text_config()
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    weights = 0.0
    for name, shape in parameter_shapes(model).items():
        whole = prod(shape) * itemsize if quantization is None else quantization.bytes_of(name, shape, itemsize)
        shares_experts = engine.expert_parallel_size > 1 and ".experts." in name
        weights += whole / (engine.expert_parallel_size if shares_experts else tensor)
    cached = itemsize if engine.kv_cache_dtype == "auto" else 1
    hidden, width = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return EngineMemory(
        weights=weights / stages,
        workspace=_BATCHED_TOKENS * (2 * width / tensor + 4 * hidden) * itemsize + _SEQUENCES * text.vocab_size * 2 * 4,
        cache_per_token=cached_numbers(text, tensor) * cached / stages,
    )


def cached_numbers(text: Any, tensor: int) -> float:
    """Count the numbers that a rank caches for each token: per layer, keys and values of its heads, or one latent."""
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    layers = sum(not kind.startswith(_WITHOUT_CACHE) for kind in kinds)
    if getattr(text, "kv_lora_rank", None):  # latent attention: the same vector for all heads, so on every rank
        return float(layers * (text.kv_lora_rank + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return float(layers * 2 * -(-heads // tensor) * head_size(text))
