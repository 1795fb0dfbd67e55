"""Check that vLLM can compute the adapters of a configuration, and choose vLLM's arguments for them.

vLLM copies the adapters of a step into slots of one size. Source: `vllm.config.lora.LoRAConfig`, and for the largest
vocabulary `vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA`. Invariant: this module does not import vllm.
"""

from collections.abc import Sequence
from typing import Any

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.config.rules.engines import ENGINE_SIZES
from nemo_rl.models.adapters.lora_linear import SECTION
from nemo_rl.models.adapters.slots import slot_sizes
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.huggingface.load import load_model_config, reads_more_than_text, torch_dtype
from nemo_rl.models.huggingface.recurrent import has_states
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.models.training.low_rank import select_modules
from nemo_rl.utils.errors import ConfigError

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of slots in vLLM."""
_SLOTS = 4
"""Largest number of adapters in a step, unless `vllm_kwargs.max_loras` is set. Requests of others wait."""
_HELD = 1 << 16
"""Largest number of adapters in memory. It is never reached, because adapters that are evicted could not come back."""
_LARGEST_VOCABULARY = 258_048
"""Largest vocabulary of an output head that vLLM adapts."""


def check_adapters(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Refuse settings with which vLLM does not compute adapters (`registry.EngineKind.check_adapters`).

    Raises:
        ConfigError: A setting or the model is not supported. The message names it.
    """
    engine, given = policy.sampling.engine, policy.sampling.vllm_kwargs
    for name in ENGINE_SIZES:
        if (size := getattr(engine, name)) > 1:
            raise ConfigError(
                f"Adapters in vLLM are proven for undivided engines, and policy.generation.engine.{name}={size}. "
                "Set it to 1; more engines share the requests."
            )
    if given.get("speculative_config") is not None:
        raise ConfigError(
            "Adapters in vLLM are not proven with policy.generation.vllm_kwargs.speculative_config. Remove it."
        )
    if engine.precision == "fp8":
        raise ConfigError("Adapters in vLLM need policy.generation.engine.precision=auto, not fp8.")
    if policy.zero_mismatch:
        raise ConfigError(
            "Adapters in vLLM are not proven with policy.zero_mismatch=true. Set it to false, or "
            "policy.generation.backend=hf."
        )
    if policy.router_replay.enabled:
        raise ConfigError("Adapters in vLLM are not proven with policy.router_replay.enabled=true. Set it to false.")
    model = load_model_config(policy.model_name, policy.hf_config_overrides)
    unproven = {
        "reads more than text": reads_more_than_text(model),
        "has layers with states": has_states(model),
        "has experts": bool(expert_parameters_of(model)),
        "has latent attention": getattr(model.get_text_config(), "kv_lora_rank", None) is not None,
    }
    for what, has_it in unproven.items():
        if has_it:
            raise ConfigError(
                f"policy.model_name={policy.model_name!r} {what}, for which adapters in vLLM are not proven. Set "
                "policy.generation.backend=hf."
            )
    if policy.sends_adapters:
        slot_rank(policy.dtensor_cfg.lora_cfg.dim, f"{SECTION}.dim")
    elif (size := model.get_text_config().vocab_size) > _LARGEST_VOCABULARY:
        raise ConfigError(
            f"policy.model_name={policy.model_name!r} has {size} tokens, and vLLM adapts output heads of up to "
            f"{_LARGEST_VOCABULARY}. Set policy.generation.backend=hf."
        )


def slot_rank(rank: int, key: str = "The rank") -> int:
    """Return the smallest rank of slots that holds adapters of a rank.

    Raises:
        ConfigError: The rank is too large.
    """
    for size in SLOT_RANKS:
        if rank <= size:
            return size
    raise ConfigError(f"{key}={rank} is more than vLLM's largest rank of {SLOT_RANKS[-1]}. Lower it, or use engine hf.")


def adapted_layers(settings: EngineSettings) -> dict[str, int]:
    """Return the layers that adapters of an engine may have, with their numbers of inputs and outputs together."""
    if settings.lora is None and not settings.holds_adapters:
        return {}
    model = load_model_config(settings.model_name, settings.hf_overrides)
    sizes = slot_sizes(model, with_head=settings.lora is None)
    names = list(sizes) if settings.lora is None else select_modules(list(sizes), settings.lora, SECTION)
    return {name: sizes[name] for name in names}


def slot_bytes(settings: EngineSettings) -> float:
    """Return the bytes of the slots on a rank (`registry.EngineKind.slot_bytes`).

    A slot has both matrices of each layer with the largest rank, also while it is empty.
    """
    layers = adapted_layers(settings)
    given = adapter_arguments(settings, list(layers)) | settings.engine_kwargs
    if not layers:
        return 0.0
    numbers = given["max_loras"] * given["max_lora_rank"] * sum(layers.values())
    return float(numbers * torch_dtype(settings.precision).itemsize) / settings.tensor_parallel_size


def adapter_arguments(settings: EngineSettings, layers: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's arguments for adapters of these layers. They are empty without layers."""
    if not layers:
        return {}
    is_one = settings.lora is not None
    return {
        "enable_lora": True,
        "max_loras": 1 if is_one else _SLOTS,
        "max_cpu_loras": _HELD,
        "max_lora_rank": slot_rank(settings.lora.dim if settings.lora is not None else settings.max_adapter_rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
