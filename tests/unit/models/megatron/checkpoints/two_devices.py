"""Imitate a GPU and its host on CPUs: a mark says which tensors are on the host; values are real.

Tensors are the GPU's unless they come from `.cpu()`, `.to("cpu")`, host memory or a tensor of the host.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_FOLLOWS = {torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.zeros_like, torch.empty_like}


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host."""
    return getattr(tensor, "on_host", False)


def _marked(tensor: Tensor) -> Tensor:
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


class _TwoDevices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA:
            return not on_host(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and args[1:] == ("cpu",)):
            return _marked(args[0].detach().clone())
        if func is torch.Tensor.to and args[1:] == ("cuda",):
            return _copy(args[0])
        if func in (torch.empty, torch.empty_like) and kwargs.get("device") == "cpu":
            return _marked(func(*args, **kwargs | {"pin_memory": False}))
        found = func(*args, **kwargs)
        if func in _FOLLOWS and on_host(args[0]):
            _marked(found)
        return found


def _within(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _TwoDevices():
            return function(*args, **kwargs)

    return call


def _copy(tensor: Tensor, device: Any = None) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.detach().clone()


@contextmanager
def two_devices() -> Iterator[None]:
    """Make this process act as on a GPU without Transformer Engine, for an optimizer and the moves of its state."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    from nemo_rl.models.megatron import optimizer
    from nemo_rl.models.megatron.checkpoints import run_state
    from nemo_rl.models.training import torch_backend

    places = {
        HybridDeviceOptimizer: ("__init__", "step"),
        run_state: ("state_to_load", "put_back"),
        torch_backend.HostMemory: ("store",),
    }
    with ExitStack() as patches:
        for owner, names in places.items():
            patches.enter_context(patch.multiple(owner, **{name: _within(getattr(owner, name)) for name in names}))
        patches.enter_context(patch.multiple(optimizer, is_on_gpu=lambda chunks: True, find_spec=lambda name: None))
        patches.enter_context(
            patch.multiple(torch_backend, _is_on=lambda device, tensor: not on_host(tensor), _copy=_copy)
        )
        yield
