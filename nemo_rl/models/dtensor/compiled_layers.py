"""Compile the decoder layers of a model, so that chains of elementwise operations become one kernel.

Each layer is compiled separately, before FSDP2 shards it, and its hooks (gathering of weights, activation
checkpointing) stay outside of the compiled code. Attention is not compiled: it has kernels of its own. All layers of a
kind share one compilation, and sizes of microbatches are symbols in it, so a model compiles a few times per run.

Invariant: scores and gradients are those of uncompiled layers up to rounding. Compiled code in bfloat16 rounds less
often, because a chain's intermediate values stay in float32.
"""

import os
import shutil
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs.fusion import has_triton
from nemo_rl.models.dtensor.attention import VARLEN_ATTENTION, varlen_attention
from nemo_rl.models.dtensor.experts.parallel import find_experts
from nemo_rl.models.huggingface.layers import decoder_layers
from nemo_rl.utils.errors import ConfigError

COMPILES_ON_GPUS = False
"""Whether GPUs compile the layers of a run that leaves the key at null; the only place that decides it.

Set it to True when a GPU has passed the rows "compiled layers" (the numbers hold) and "compiled training step"
(`times_as_fast` above 1 for short and long rows) of `tools/gpu_check.py`; no GPU has run them. The tests of this file
show on CPUs that the numbers hold.
"""
_KEY = "policy.dtensor_cfg.compile_layers"
_MOST_VARIANTS = 32
"""Compilations of one function before torch gives up and runs it uncompiled: with and without gradients, for frozen
and trained inputs, and for padded rows, packed rows and rows that share tokens, for each kind of layer."""
_CPU_COMPILERS = ("g++", "clang++")


def wants_compiled(asked: bool | None, hf: PreTrainedModel, device: torch.device, *, fits: bool) -> bool:
    """Return whether to compile the layers of a model.

    Args:
        asked: the key; null leaves the choice to `COMPILES_ON_GPUS`, for models and settings with which it is possible.
        hf: the model.
        device: device on which it computes.
        fits: whether the other settings allow it, as far as the configuration does not refuse them already.
    """
    if asked is not None:
        return asked
    return COMPILES_ON_GPUS and device.type != "cpu" and fits and not find_experts(hf) and has_triton()


def compile_layers(hf: PreTrainedModel, device: torch.device) -> None:
    """Compile the forward pass of every decoder layer, in place; the compiler runs in the first pass.

    Args:
        hf: the model, whose layers are divided among tensor-parallel ranks but not yet sharded by FSDP2.
        device: device on which the layers compute.

    Raises:
        ConfigError: the model has experts, or no compiler for the device is installed.
    """
    if find_experts(hf):
        raise ConfigError(
            f"{type(hf).__name__} routes tokens to experts, whose sizes differ in every microbatch, so its layers "
            f"cannot be compiled. Set {_KEY}=false."
        )
    _require_compiler(device)
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MOST_VARIANTS)
    AttentionInterface.register(VARLEN_ATTENTION, torch.compiler.disable(varlen_attention))
    for layer in decoder_layers(hf):
        compiled: Any = torch.compile(layer.forward, dynamic=True)
        layer.forward = compiled


def _require_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        names = [os.environ["CXX"]] if "CXX" in os.environ else list(_CPU_COMPILERS)
        found, needed = any(shutil.which(name) for name in names), f"a C++ compiler ({' or '.join(names)})"
    else:
        found, needed = has_triton(), "triton, which the wheels of torch for GPUs install,"
    if not found:
        raise ConfigError(f"{_KEY}=true needs {needed}. Install it, or set {_KEY}=false.")
