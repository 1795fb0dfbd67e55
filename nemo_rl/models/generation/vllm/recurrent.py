"""Clear the states of vLLM's recurrent layers, and verify their weights after an update, inside vLLM's worker.

A request's state is computed by the weights of its time. After an update that recomputes the caches, and after sleep,
`clear_states` sets all states to 0, so that nothing of older weights or of freed memory can be read.

vLLM converts and copies the weights of recurrent layers: it holds `A = -exp(A_log)`, divides the convolution in blocks,
packs it for CPUs, and Mamba-2 keeps a second copy of it. After a loader that skips one of these steps, old values
remain without an error, and checksums of the received bytes do not show it. Therefore `note_sent` keeps the small
tensors of an update, and `altered` compares them with what the layers compute with. Invariant: `altered` returns
nothing if and only if the layers hold the rank's part of the tensors that were sent last.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

_SENT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\b(A_log|D|dt_bias|conv1d\.weight|conv1d\.bias)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

SentTensors = dict[tuple[int, str], Tensor]
"""Sent tensors of recurrent layers by number of the layer and name within the layer."""


def clear_states(worker: Any) -> None:
    """Set the states of all requests to 0. No request may be running."""
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, MambaBase):
            for state in module.kv_cache:
                state.zero_()


def note_sent(sent: SentTensors, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Add copies of an update's small tensors of recurrent layers to `sent`."""
    for name, tensor in tensors:
        found = _SENT.search(name)
        if found is not None:
            sent[int(found[1]), found[2]] = tensor.clone()


def altered(model: nn.Module, sent: SentTensors) -> list[str]:
    """Return names of weights of recurrent layers that differ from the rank's part of what was sent."""
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, MambaMixer2 | QwenGatedDeltaNetAttention):
            continue
        number = _LAYER.search(f"{name}.")
        assert number is not None
        for own, held, right in _pairs(module, int(number[1]), sent):
            if held.shape != right.shape or not torch.allclose(held, right, rtol=1e-5, atol=0, equal_nan=True):
                names.append(f"{name}.{own}")
    return names


def _pairs(module: Any, layer: int, sent: SentTensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield for each sent tensor of a layer: the name in vLLM, what the layer computes with, and what it should be."""
    of_layer = {name: tensor for (number, name), tensor in sent.items() if number == layer}
    is_mamba = isinstance(module, MambaMixer2)
    for name in {"A_log", "D", "dt_bias"} & of_layer.keys():
        own = of_layer[name].chunk(module.tp_size)[get_tensor_model_parallel_rank()]
        if name == "A_log" and is_mamba:
            yield "A", module.A, -own.to(module.A).exp()
        else:
            held = getattr(module, name)
            yield name, held, own.to(held)
    convolution = module.conv1d
    for name in {"conv1d.weight", "conv1d.bias"} & of_layer.keys():
        own = _own_channels(module, of_layer[name].flatten(1) if name == "conv1d.weight" else of_layer[name])
        if name == "conv1d.bias":
            yield name, convolution.bias, own.to(convolution.bias)
        elif is_mamba:
            yield name, module.conv_weights, own.to(module.conv_weights)
        elif hasattr(convolution, "_cpu_unpacked_conv_weight"):
            packed = convolution.weight
            yield name, packed, _custom_ops.causal_conv1d_weight_pack(own.to(packed).contiguous())
        else:
            held = convolution.weight.flatten(1)
            yield name, held, own.to(held)


def _own_channels(module: Any, whole: Tensor) -> Tensor:
    """Return the rank's channels of a convolution, `[channels, ...]` with blocks that are divided one by one.

    The blocks are x, B and C of a Mamba-2 layer, and query, key and value of a gated delta net. A single group of B and
    C belongs to all ranks.
    """
    if isinstance(module, MambaMixer2):
        of_groups = (len(whole) - module.intermediate_size) // 2
        sizes = [module.intermediate_size, of_groups, of_groups]
        divided = [True, *[of_groups == module.groups_ssm_state_size] * 2]
    else:
        sizes, divided = [module.key_dim, module.key_dim, module.value_dim], [True] * 3
    blocks, rank = zip(whole.split(sizes), divided, strict=True), get_tensor_model_parallel_rank()
    return torch.cat([block.chunk(module.tp_size)[rank] if cut else block for block, cut in blocks])
