"""Describe float8 weights to vLLM as the `quantization_config` of a checkpoint does.

Sources: `vllm.model_executor.layers.quantization.fp8.Fp8Config` (`weight_block_size`, names `weight_scale_inv`) and
`modelopt.ModelOptMxFp8Config` (names `weight_scale`, uint8). vLLM quantizes all linear layers but those that are
listed, so every linear layer whose weights arrive as they are has to be in the list. Invariant: the list and what is
sent both come from `WeightQuantization.takes`.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.quantization.weights import WeightQuantization

logger = logging.getLogger(__name__)

_MX_CAPABILITY = (10, 0)
"""First compute capability whose tensor cores read MXFP8 (Blackwell)."""
_EXPERT = "{}.0.gate_proj.weight"
"""A weight of an expert in hub checkpoints, whose names are longer than that of the module that holds all experts."""


def quantization_config(quantization: WeightQuantization, unquantized: Iterable[str]) -> dict[str, Any]:
    """Return `quantization_config`, which replaces that of the model's files.

    Args:
        quantization: what is sent.
        unquantized: names of the layers that stay as they are.
    """
    block_format, ignored = quantization.block_format, sorted(unquantized)
    if block_format.scales == "e8m0":
        return {"quant_method": "mxfp8", "ignored_layers": ignored}
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_format.rows, block_format.columns],
        "ignored_layers": ignored,
    }


def warn_of_weights_only(quantization: WeightQuantization, capability: tuple[int, int]) -> None:
    """Warn of MXFP8 on a GPU without kernels for it, where vLLM rounds weights and no activations.

    Args:
        quantization: what is sent.
        capability: compute capability of the GPU.
    """
    if quantization.block_format.scales == "e8m0" and capability < _MX_CAPABILITY:
        logger.warning(
            "policy.generation.vllm_cfg.is_mx=true: GPUs of compute capability %d.%d multiply no MXFP8 matrices. vLLM "
            "reads the weights in float8 and computes in 16 bits, which is slower than blocks of 128 x 128 and rounds "
            "no activations. Set is_mx=false, or use GPUs of capability 10.0 or later.",
            *capability,
        )


def unquantized_layers(model: PretrainedConfig, quantization: WeightQuantization) -> list[str]:
    """Return the names of linear layers and of lists of experts whose weights arrive as they are.

    Builds the Hugging Face model without memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built: nn.Module = AutoModelForCausalLM.from_config(model)
    names = []
    for name, module in built.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, torch.Tensor):
            if not quantization.takes(f"{name}.weight", tuple(weight.shape)):
                names.append(name)
        elif name.endswith(".experts") and not quantization.takes(_EXPERT.format(name), (1, 1)):
            names.append(name)
    return names
