"""Refuse models that vLLM cannot serve with float8 weights or with a float8 key-value cache.

Sources: `validate_fp8_block_shape` of `vllm.model_executor.layers.quantization.utils.fp8_utils`: matrices that vLLM
joins (query, key and value; gate and up) or divides over ranks end at the border of a block. `CPU_ATTN` and `CPU_MLA`
of `vllm.v1.attention.backends`: what CPUs can hold in float8.
"""

from collections.abc import Iterator
from typing import Any

import torch

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.models.huggingface.sizes import head_size
from nemo_rl.models.quantization.choice import weight_quantization
from nemo_rl.utils.errors import ConfigError

_CPU_CACHE_HEADS = 32
"""Head sizes of a float8 cache on CPUs are multiples of this."""
_CACHE_KEY = "policy.generation.vllm_cfg.kv_cache_dtype"


def check_float8(policy: PolicyConfig, cluster: ClusterConfig, model: Any) -> None:
    """Check the float8 formats that `policy.generation` asks for.

    Args:
        policy: the section.
        cluster: the machines.
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: vLLM would refuse the model, or compute it wrongly.
    """
    generation = policy.generation
    assert generation is not None
    problems = [] if cluster.uses_gpu else list(_cache_on_cpu(generation, model))
    quantization = weight_quantization(policy, cluster)
    if quantization is not None:
        kept = quantization.first_layers + quantization.last_layers
        if kept >= quantization.num_layers:
            problems.append(
                f"policy.generation.vllm_cfg: num_first_layers_in_bf16 + num_last_layers_in_bf16 = {kept} leave none "
                f"of the model's {quantization.num_layers} layers in fp8. Lower them, or set precision=bfloat16."
            )
        if not quantization.simulated:
            block = quantization.block_format
            problems += _shapes(model, generation, *((1, block.columns) if block.rows == 1 else (block.rows,) * 2))
    if problems:
        raise ConfigError("\n".join(problems))


def _cache_on_cpu(generation: GenerationConfig, model: Any) -> Iterator[str]:
    asked = generation.engine.kv_cache_dtype
    if asked == "auto":
        return
    given, capability = f"{_CACHE_KEY}={asked}", torch.backends.cpu.get_cpu_capability()
    if getattr(model, "kv_lora_rank", None):
        yield f"{given}: on CPUs vLLM caches latent attention (MLA) in the engine's own precision only. Set it to auto."
    elif getattr(model, "num_attention_heads", None) and head_size(model) % _CPU_CACHE_HEADS:
        yield (
            f"{given}: on CPUs vLLM needs heads of a multiple of {_CPU_CACHE_HEADS}, and the model's have "
            f"{head_size(model)}. Set it to auto."
        )
    elif not capability.startswith("AVX512"):
        yield f"{given}: on CPUs vLLM needs AVX-512, and this processor has {capability}. Set it to auto."


def _shapes(model: Any, generation: GenerationConfig, rows: int, columns: int) -> Iterator[str]:
    """Yield the sizes that blocks of float8 weights do not fit."""
    tensor = generation.engine.tensor_parallel_size
    if getattr(model, "model_type", "") == "gpt_oss":
        yield (
            "policy.generation.vllm_cfg.precision=fp8: the experts of GPT-OSS are one tensor, which vLLM does not read "
            "in fp8. Set it to bfloat16."
        )
        return
    width = getattr(model, "intermediate_size", None)
    heads = getattr(model, "num_attention_heads", None)
    cuts_columns = tensor > 1 or rows == 1  # blocks along a row are always whole
    sizes = {"intermediate_size": (width, rows), "columns of intermediate_size": (cuts_columns and width, columns)}
    if heads and not getattr(model, "kv_lora_rank", None):
        per_head, kv_heads = head_size(model), getattr(model, "num_key_value_heads", None) or heads
        of_heads = heads * per_head
        sizes["query heads"] = (of_heads, rows)
        sizes["key-value heads"] = (max(kv_heads, tensor) * per_head, rows)
        sizes["columns of the output projection"] = (cuts_columns and of_heads, columns)
    wrong = [
        f"{name} {size} / {tensor} = {size / tensor:g}, no multiple of {block}"
        for name, (size, block) in sizes.items()
        if size and (size % tensor or size // tensor % block)
    ]
    if wrong:
        yield (
            f"policy.generation.vllm_cfg.precision=fp8: blocks of {rows} x {columns} do not fit the parts of the model "
            f"that a rank of an engine holds: {'; '.join(wrong)}. Lower tensor_parallel_size={tensor}, set is_mx=true "
            "(blocks of 1 x 32) or precision=bfloat16."
        )
