"""Check before an engine is built that vLLM can divide a model over ranks and use float8 for it.

The division is checked with the arithmetic of vLLM's layers. Sources:
`vllm.config.model.ModelConfig.verify_with_parallel_config` (heads, layers), `QKVParallelLinear` of
`vllm.model_executor.layers.linear` (key-value heads are divided, or copied), `vllm.distributed.utils.divide` (all other
sizes). Vocabularies are padded, so every size works.

Recurrent layers are checked against what vLLM has classes and kernels for, and against the cases in which it computes
another function than transformers. Sources: `vllm.model_executor.models.registry`, `layers.mamba` (`mamba_mixer2`,
`gdn`, `ops.cpu`) below `vllm.model_executor`, and `MambaModelConfig` of `vllm.model_executor.models.config`.

For float8 weights, matrices that vLLM joins (query, key and value; gate and up) or divides over ranks must end at the
boundary of a block. Source: `validate_fp8_block_shape` of `vllm.model_executor.layers.quantization.utils.fp8_utils`.
For a float8 key-value cache, `CPU_ATTN` and `CPU_MLA` of `vllm.v1.attention.backends` say what CPUs support.
"""

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.models.generation.factory import engine_precision
from nemo_rl.models.generation.registry import vllm_arguments
from nemo_rl.models.generation.vllm.speculation import check_speculation
from nemo_rl.models.generation.vllm.zero_mismatch.check import require_same_bits
from nemo_rl.models.huggingface.load import OWN_CODE, load_model_config, reads_more_than_text
from nemo_rl.models.huggingface.recurrent import has_states, time_step_limits
from nemo_rl.models.huggingface.sizes import head_size, longest_context
from nemo_rl.models.quantization import weight_quantization
from nemo_rl.utils.errors import ConfigError

_CPU_CACHE_HEADS = 32
"""On CPUs, head sizes of a float8 cache must be multiples of this number."""
_CACHE_KEY = "policy.generation.vllm_cfg.kv_cache_dtype"


def check_float8(policy: PolicyConfig, cluster: ClusterConfig, model: Any) -> None:
    """Check the float8 formats that `policy.generation` asks for.

    Args:
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: vLLM would refuse the model or compute wrong results.
    """
    generation = policy.sampling
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
    """Yield messages about sizes of the model that are not multiples of the blocks of float8 weights."""
    tensor = generation.engine.tensor_parallel_size
    if getattr(model, "model_type", "") == "gpt_oss":
        yield (
            "policy.generation.vllm_cfg.precision=fp8: the experts of GPT-OSS are one tensor, which vLLM does not read "
            "in fp8. Set it to bfloat16."
        )
        return
    width = getattr(model, "intermediate_size", None)
    heads = getattr(model, "num_attention_heads", None)
    cuts_columns = tensor > 1 or rows == 1  # blocks along a row are never cut
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


_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of `vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes`."""
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Refuse a model that vLLM computes wrongly or cannot divide (`registry.EngineKind.check`).

    Raises:
        ConfigError: The model cannot be divided over the ranks of an engine, its context is shorter than the engine's,
            or float8, speculative decoding or the bits of the trainer are not possible as configured. On a CPU, it is
            also raised if vLLM does not support the head size or the recurrent layers, or a package for images is
            missing.
    """
    whole = load_model_config(policy.model_name, policy.hf_config_overrides)
    model = whole.get_text_config()
    _check_own_code(policy, whole)
    check_engine_shape(model, policy.sampling)
    check_float8(policy, cluster, model)
    check_recurrent(policy, cluster, model)
    _check_context(model, policy.sampling.engine.max_model_len)
    check_speculation(policy, cluster, model)
    require_same_bits(policy, model)
    if cluster.uses_gpu:
        if policy.router_replay.enabled:
            _check_router_replay(policy)
        return
    reads_images = reads_more_than_text(whole) or model.model_type.startswith("qwen3_5")
    if reads_images and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"policy.model_name={policy.model_name!r}: vLLM needs torchvision for its class of {whole.model_type}, "
            "which reads images, also if it gets text alone. Set policy.generation.backend=hf, or install torchvision."
        )
    has_heads = getattr(model, "num_attention_heads", None) and not getattr(model, "kv_lora_rank", None)
    if has_heads and head_size(model) not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"policy.model_name={policy.model_name!r} has attention heads of {head_size(model)}; vLLM's on CPUs are of "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}. Set policy.generation.backend=hf, or use GPUs."
        )


def _check_own_code(policy: PolicyConfig, model: Any) -> None:
    """Refuse a model whose classes are in its folder, unless vLLM has a class of the same name."""
    found = importlib.util.find_spec("vllm")
    if not type(model).__module__.startswith(OWN_CODE) or found is None or not found.submodule_search_locations:
        return
    registry = Path(found.submodule_search_locations[0]) / "model_executor/models/registry.py"
    names = model.architectures or ["no class"]
    if not any(f'"{name}"' in registry.read_text(encoding="utf-8") for name in names):
        raise ConfigError(
            f"policy.model_name={policy.model_name!r}: vLLM has no class {names[0]}, and the one in the model's folder "
            "is not proven in vLLM. Set policy.generation.backend=hf."
        )


_WITHOUT_CLASS = ("bamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zaya")
_MAMBA_1 = ("falcon_mamba", "jamba", "mamba")
_GPU_KERNELS = ("inkling_text", "kimi_linear", "olmo_hybrid", "qwen4_exp_text")
_DELTA = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_MAMBA_2 = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
_NORMS_OF_ALL = ("granitemoehybrid", "mamba2")
"""Architectures whose gated norm vLLM computes for each group of B and C, and transformers for all channels."""
_CPU_DELTA_HEADS = (64, 128)
"""Head sizes of gated delta nets on CPUs, equal for keys and values."""


def check_recurrent(policy: PolicyConfig, cluster: ClusterConfig, model: Any) -> None:
    """Refuse a model with recurrent layers that vLLM cannot run, or computes otherwise than the trainer.

    Args:
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: The message says what is missing.
    """
    problems = list(_of_recurrent_layers(model))
    if not cluster.uses_gpu:
        problems += _of_recurrent_layers_on_cpus(policy, model)
    if problems:
        name = f"policy.model_name={policy.model_name!r} ({model.model_type})"
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))


def _of_recurrent_layers(model: Any) -> Iterator[str]:
    """Yield what vLLM does not compute on any device."""
    kind, otherwise = model.model_type, "Set policy.generation.backend=hf."
    if kind in _WITHOUT_CLASS:
        yield f"vLLM 0.32 has no class for it. {otherwise}"
    groups = getattr(model, "mamba_n_groups" if kind == "granitemoehybrid" else "n_groups", None) or 1
    if kind in _NORMS_OF_ALL and groups > 1:
        yield (
            f"it has {groups} groups of B and C. vLLM norms each group, and transformers all channels, so that engine "
            f"and trainer would disagree. {otherwise}"
        )
    if kind == "falcon_h1" and model.mamba_rms_norm and model.mamba_norm_before_gate:
        yield (
            "vLLM norms after the gate, and the model before it (mamba_norm_before_gate=true), so that engine and "
            f"trainer would disagree. {otherwise}"
        )
    if kind in _MAMBA_2 and time_step_limits(model) != (0.0, math.inf):
        yield f"vLLM ignores time_step_limit={list(time_step_limits(model))}. {otherwise}"


def _of_recurrent_layers_on_cpus(policy: PolicyConfig, model: Any) -> Iterator[str]:
    """Yield what vLLM does not compute on CPUs."""
    kind, otherwise = model.model_type, "Set policy.generation.backend=hf, or use GPUs."
    if kind in _MAMBA_1:
        yield f"vLLM has no kernel for CPUs for its selective scan (Mamba-1). {otherwise}"
    if kind in _GPU_KERNELS:
        yield f"vLLM has Triton kernels for its recurrent layers, and none for CPUs. {otherwise}"
    if kind in _DELTA:
        precision = engine_precision(policy)
        if precision != "bfloat16":
            yield (
                f"vLLM computes gated delta nets on CPUs in bfloat16 only, not in {precision}. Set "
                "policy.generation.engine.precision=bfloat16, or policy.generation.backend=hf."
            )
        sizes = {key: getattr(model, key) for key in ("linear_key_head_dim", "linear_value_head_dim")}
        if len(set(sizes.values())) > 1 or not set(sizes.values()) <= set(_CPU_DELTA_HEADS):
            given = ", ".join(f"{key}={size}" for key, size in sizes.items())
            known = " or ".join(map(str, _CPU_DELTA_HEADS))
            yield f"{given}: vLLM's kernel for CPUs needs {known} for both. {otherwise}"
    if has_states(model) and vllm_arguments(policy).get("enable_prefix_caching"):
        yield (
            "vLLM cannot share prompts on CPUs in a model with recurrent layers, because its kernels return no states "
            "within a prompt. Leave out policy.generation.vllm_cfg.enable_prefix_caching, or set it to false."
        )


def _check_context(model: Any, asked: int) -> None:
    """Refuse a context that is longer than that of the model, as vLLM does."""
    most = longest_context(model)
    if most is not None and asked > most and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise ConfigError(
            f"policy.generation.engine.max_model_len={asked}, but the model reads {most} tokens "
            f"(max_position_embeddings={model.max_position_embeddings}). Set it to at most {most}; by default it is "
            "policy.max_total_sequence_length."
        )


def check_engine_shape(model: Any, generation: GenerationConfig) -> None:
    """Refuse parallel sizes that do not divide a model.

    Args:
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: A size does not divide the model. The message contains the arithmetic and the sizes that do.
    """
    engine = generation.engine
    tensor, stages, experts = (
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
    )
    num_experts = _first(model, *_NUM_EXPERTS)
    problems = []
    remainders = list(_remainders(model, tensor, whole_experts=experts > 1))
    if remainders:
        heads = model.num_attention_heads
        fitting = [n for n in range(1, heads + 1) if not list(_remainders(model, n, whole_experts=experts > 1))]
        problems.append(
            f"engine.tensor_parallel_size={tensor} does not divide the model: {', '.join(remainders)}. "
            f"Sizes that do: {', '.join(map(str, fitting))}."
        )
    layers = model.num_hidden_layers
    if stages > layers:
        problems.append(
            f"engine.pipeline_parallel_size={stages} is more than the model's {layers} layers. Use at most {layers}."
        )
    if experts > 1 and not num_experts:
        problems.append(f"engine.expert_parallel_size={experts}, but the model has no experts. Set it to 1.")
    elif experts > (num_experts or experts):
        problems.append(
            f"engine.expert_parallel_size={experts} is more than the model's {num_experts} experts. Set it to 1, or "
            f"lower it (and a larger tensor_parallel_size) to at most {num_experts}."
        )
    if problems:
        raise ConfigError("policy.generation." + "\npolicy.generation.".join(problems))


def _remainders(model: Any, ranks: int, *, whole_experts: bool) -> Iterator[str]:
    """Yield the sizes that this number of tensor-parallel ranks does not divide."""
    of_experts = "moe_intermediate_size"
    if _first(model, of_experts) is None and _first(model, *_NUM_EXPERTS):
        of_experts = "intermediate_size"
    divided = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
    for name in divided:
        size = _first(model, name)
        if size and size % ranks and not (whole_experts and name == of_experts):
            yield f"{name} {size} / {ranks} = {size / ranks:g}"
    kv_heads = _first(model, "num_key_value_heads")
    latent = _first(model, "kv_lora_rank")
    if kv_heads and not latent and kv_heads % ranks and ranks % kv_heads:
        yield f"num_key_value_heads {kv_heads} and {ranks} do not divide each other"


def _first(model: Any, *names: str) -> int | None:
    found = (getattr(model, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _check_router_replay(policy: PolicyConfig) -> None:
    """Refuse settings with which vLLM does not report experts on GPUs (`vllm.config.VllmConfig`)."""
    arguments = vllm_arguments(policy)
    speculation = arguments.get("speculative_config") or {}
    stages = arguments.get("pipeline_parallel_size", policy.sampling.engine.pipeline_parallel_size)
    refused = [f"policy.generation.engine.pipeline_parallel_size={stages}"] if stages > 1 else []
    if arguments.get("enable_prefix_caching") is False:
        refused.append("policy.generation.vllm_cfg.enable_prefix_caching=false")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if arguments.get(name, 1) > 1:
            refused.append(f"policy.generation.vllm_kwargs.{name}={arguments[name]}")
    if isinstance(speculation, Mapping) and speculation.get("enable_adaptive_verification"):
        refused.append("policy.generation.vllm_kwargs.speculative_config.enable_adaptive_verification=true")
    if refused:
        raise ConfigError(
            f"policy.router_replay.enabled=true, but vLLM on GPUs reports no experts with {' and '.join(refused)}. "
            f"Leave {'them' if len(refused) > 1 else 'it'} out, or set policy.router_replay.enabled=false."
        )
