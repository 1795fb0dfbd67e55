"""Check that a model divides over the ranks of an engine, by the arithmetic of vLLM's layers, before any is built.

Sources: `vllm.config.model.ModelConfig.verify_with_parallel_config` (heads, layers), `QKVParallelLinear` of
`vllm.model_executor.layers.linear` (key-value heads are divided, or copied), `vllm.distributed.utils.divide` (all
other sizes). Vocabularies are padded, so every size works.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.models.generation.vllm.float8.check import check_float8
from nemo_rl.models.generation.vllm.speculation.settings import check_speculation
from nemo_rl.models.huggingface.load import load_model_config, reads_more_than_text
from nemo_rl.models.huggingface.sizes import head_size, longest_context
from nemo_rl.utils.errors import ConfigError

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""`vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes`."""
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Refuse a model that vLLM computes wrongly or cannot divide; see `registry.EngineKind.check`.

    Raises:
        ConfigError: the model does not divide over the ranks of an engine, its context is shorter than the engine's, or
            float8 or speculative decoding is not possible as configured; or, on a CPU, vLLM does not support its head
            size there, a package for its images is missing, or it has latent attention (such as DeepSeek-V3's) with
            plain rotary embeddings.
    """
    assert policy.generation is not None
    whole = load_model_config(policy.model_name, policy.hf_config_overrides)
    model = whole.get_text_config()
    check_engine_shape(model, policy.generation)
    check_float8(policy, cluster, model)
    _check_context(model, policy.generation.engine.max_model_len)
    check_speculation(policy, cluster, model)
    if cluster.uses_gpu:
        return
    if reads_more_than_text(whole) and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"policy.model_name={policy.model_name!r} reads more than text. vLLM needs torchvision for its image "
            "processor, also if it gets text alone. Set policy.generation.backend=hf, or install torchvision."
        )
    rope = getattr(model, "rope_parameters", None) or {}
    has_heads = getattr(model, "num_attention_heads", None)
    lacks = None
    if getattr(model, "kv_lora_rank", None):
        if rope.get("rope_type", "default") == "default":
            lacks = "latent attention (MLA) with plain rotary embeddings, which vLLM computes wrongly on CPUs"
    elif has_heads and head_size(model) not in _CPU_HEAD_SIZES:
        lacks = f"attention heads of {head_size(model)}; vLLM's on CPUs are of {', '.join(map(str, _CPU_HEAD_SIZES))}"
    if lacks is not None:
        raise ConfigError(
            f"policy.model_name={policy.model_name!r} has {lacks}. Set policy.generation.backend=hf, or use GPUs."
        )


def _check_context(model: Any, asked: int) -> None:
    """Refuse a context that is longer than the model's, as vLLM does."""
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
        generation: the section `policy.generation`.

    Raises:
        ConfigError: a size does not fit; the message has the arithmetic and the sizes that fit.
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
    """Yield the sizes that tensor parallelism over this number of ranks cannot divide."""
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
