"""Keep a model's state in host memory while other models use its device.

Invariant: memory is allocated once for each tensor, page-locked if a GPU copies from and to it, and reused by every
later move; the state comes back bit for bit.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_rl.host.device import device_for


class HostMemory:
    """Named copies of tensors.

    Args:
        pinned: page-lock the memory, so that copies to and from a GPU are asynchronous (see
            `host.device.exact_page_locking`).
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    def store(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor, sharded or not, into the memory of this name.

        Returns:
            The copy, which the next `store` of the name overwrites. A copy from a GPU is complete for the host after a
            synchronisation, and immediately for later work of that GPU.
        """
        held = self._copies.get(name)
        if held is None:
            held = self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
        return held.copy_(tensor, non_blocking=True)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor was stored under the name."""
        return name in self._copies


@torch.no_grad()
def move_state(optimizer: Optimizer, memory: HostMemory, device: torch.device, *, to_host: bool) -> None:
    """Move an optimizer's state, except step counts, from a device into host memory or back.

    State on other devices stays where it is, as do entries that are the parameter itself.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value is parameter:
                continue
            place = f"{index}.{name}"
            if to_host and _is_on(device, value):
                state[name] = memory.store(place, value)
            elif not to_host and place in memory:
                state[name] = _copy(value, device)


@torch.no_grad()
def move_weights(model: nn.Module, memory: HostMemory, device: torch.device, *, to_host: bool) -> None:
    """Move a model's parameters and buffers, which are resharded already, into host memory or to a device."""
    if not to_host:
        model._apply(lambda tensor: _copy(tensor, device))
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    copies = {id(tensor): memory.store(name, tensor) for name, tensor in named}
    # FSDP2 reads the tensors from `_apply` on the host, where it pads an uneven shard into separate memory.
    device_for(uses_gpu=device.type != "cpu").synchronize()
    model._apply(lambda tensor: copies[id(tensor)])


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device.type == device.type


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, non_blocking=True, copy=True)
