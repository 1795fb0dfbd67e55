"""Find out what a pass over rows costs: the model's operations, and the device that computes them."""

import logging
from dataclasses import dataclass

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.host.device import device_name
from nemo_rl.models.huggingface.flops import ModelFlops, model_flops
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.training.low_rank import select_modules

logger = logging.getLogger(__name__)

_NOT_COUNTED = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError)
"""Errors of architectures that transformers cannot make from their configuration, or that lack common fields."""


@dataclass(frozen=True)
class PassCosts:
    """Cost of a pass over rows."""

    flops: ModelFlops | None
    """The model's operations; None if they cannot be counted."""
    device: str | None
    """Name of the GPU; None for a CPU."""
    reason: str = ""
    """Why the operations are not known; empty if they are."""
    is_failure: bool = False
    """Whether nothing could be found out, so that another attempt may succeed."""


def pass_costs(config: PolicyConfig, device: torch.device) -> PassCosts:
    """Return the costs of a model's passes.

    Adapters of the Megatron backend count as if they were on all linear layers: its layers have other names, and
    adapters have a small share of the operations.

    Args:
        config: the policy section.
        device: device of the rank.
    """
    name = None if device.type == "cpu" else device_name(device)
    lora, peft = config.dtensor_cfg.lora_cfg, config.megatron_cfg.peft
    dim = {"dtensor_cfg.lora_cfg": lora.dim, "megatron_cfg.peft": peft.dim}
    adapters = [dim[key] for key in config.adapter_keys]

    def adapted(linears: list[str]) -> list[str]:
        return select_modules(linears, lora, "policy.dtensor_cfg.lora_cfg") if lora.enabled else linears

    try:
        flops = model_flops(
            load_model_config(config.model_name, config.hf_config_overrides),
            scores=config.reward_model_cfg.enabled,
            adapters=adapters[0] if adapters else 0,
            adapted=adapted,
        )
    except _NOT_COUNTED as error:
        return PassCosts(None, name, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    return PassCosts(flops, name)
