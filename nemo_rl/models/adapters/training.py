"""Train an adapter: add up its gradients, and update it with AdamW.

The optimizer is `torch.optim.AdamW` with the parameters of each call. Invariant: the state depends on the passes and
updates of this adapter only, and is equal on all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.models.adapters.tensors import AdapterTensors

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GRADIENT, _STEP = "gradient", "step"


@dataclass(frozen=True)
class UpdateParams:
    """Parameters of one AdamW update (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    learning_rate: float
    """Learning rate."""
    betas: tuple[float, float]
    """Decays of the means of gradients and of squared gradients."""
    eps: float
    """Term in the denominator."""
    weight_decay: float
    """Decoupled weight decay."""
    max_norm: float
    """Largest norm of the gradient of all matrices. 0 means no limit."""


class TrainedAdapter:
    """An adapter with its gradients and its optimizer.

    Args:
        tensors: the adapter; its matrices are copied.
    """

    def __init__(self, tensors: AdapterTensors) -> None:
        copied = tensors.copied()
        self._parameters = {name: value.requires_grad_() for name, value in copied.parameters().items()}
        self.tensors = copied.with_parameters(self._parameters)
        """The adapter, whose matrices are updated in place."""
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()))
        self._sums: dict[str, Tensor] = {}
        """Gradients since the last update. Empty if there are none."""

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the passes since the last call, summed over the ranks in their order.

        The call is collective. Matrices without a gradient have 0.
        """
        mine = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in self._parameters.items()
        }
        self.forget_gradients()
        return mine if _num_ranks() == 1 else dict(zip(mine, _summed(list(mine.values())), strict=True))

    def forget_gradients(self) -> None:
        """Drop the gradients of passes that failed."""
        for value in self._parameters.values():
            value.grad = None

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of a pass to those since the last update."""
        for name, gradient in gradients.items():
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient.clone()

    def update(self, params: UpdateParams) -> float:
        """Make an update, set the gradients to 0, and return their norm before clipping.

        Without gradients since the last update, the update is that with gradients of 0.
        """
        for name, value in self._parameters.items():
            value.grad = self._sums.pop(name, None)
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), params.max_norm or math.inf)
        for group in self._optimizer.param_groups:
            group |= {
                "lr": params.learning_rate,
                "betas": params.betas,
                "eps": params.eps,
                "weight_decay": params.weight_decay,
            }
        self._optimizer.step()
        self.forget_gradients()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Return moments, number of updates, and gradients since the last update, by `<parameter>.<name>`."""
        found = {f"{name}.{_GRADIENT}": value for name, value in self._sums.items()}
        for name, value in self._parameters.items():
            for key, entry in self._optimizer.state.get(value, {}).items():
                found[f"{name}.{key}"] = entry
        return {name: entry.detach() for name, entry in found.items()}

    @torch.no_grad()
    def put_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        self._sums = {}
        for name, value in self._parameters.items():
            own = {key: state.get(f"{name}.{key}") for key in (*_MOMENTS, _STEP, _GRADIENT)}
            if (gradient := own.pop(_GRADIENT)) is not None:
                self._sums[name] = gradient.to(value.device, copy=True)
            held = {key: entry for key, entry in own.items() if entry is not None}
            if held:
                step = held.pop(_STEP).clone()
                self._optimizer.state[value] = {_STEP: step} | {
                    key: entry.to(value.device, copy=True) for key, entry in held.items()
                }


def expected_state(adapter: AdapterTensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the entries that the optimizer's state of an adapter may have."""
    named = adapter.parameters()
    shapes = {f"{name}.{key}": tuple(value.shape) for name, value in named.items() for key in (*_MOMENTS, _GRADIENT)}
    return shapes | {f"{name}.{_STEP}": () for name in named}


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sum tensors over the ranks, one rank after another, so that the order of the sum is fixed."""
    mine = torch.cat([tensor.flatten() for tensor in tensors])
    parts = [torch.empty_like(mine) for _ in range(_num_ranks())]
    dist.all_gather(parts, mine)
    total = parts[0]
    for part in parts[1:]:
        total += part
    pieces = total.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
