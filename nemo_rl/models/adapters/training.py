"""Train an adapter: add up its gradients, and update it with AdamW.

The optimizer is `torch.optim.AdamW` with the parameters of each call. Invariant: the state depends on the passes and
updates of this adapter only, and is equal on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.utils.errors import DataError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GRADIENT, _STEP = "gradient", "step"


@dataclass(frozen=True)
class AdamParams:
    """Parameters of one AdamW update (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    learning_rate: float = 1e-4
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-12
    """Term in the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: float = 0.0
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

    def update(self, params: AdamParams) -> float:
        """Make an update, set the gradients to 0, and return their norm before clipping.

        Without gradients since the last update, the update is that with gradients of 0.

        Raises:
            DataError: the norm or a new value would not be finite. Nothing has changed.
        """
        sums, before = self._sums, {name: value.clone() for name, value in self._everything().items()}
        for name, value in self._parameters.items():
            value.grad = sums[name].clone() if name in sums else torch.zeros_like(value)
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if params.grad_clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, norm)
        fits = self._step(params)
        self.forget_gradients()
        if not (
            fits and norm.isfinite() and all(bool(value.isfinite().all()) for value in self._everything().values())
        ):
            self._restore(before)
            raise DataError(
                f"The update would make values infinite, so it was not made: the gradient has the norm {norm:g}, with "
                f"learning_rate={params.learning_rate:g} and weight_decay={params.weight_decay:g}."
            )
        self._sums = {}
        return float(norm)

    def _step(self, params: AdamParams) -> bool:
        """Make a step of the optimizer. Return whether its numbers fit into float32."""
        for group in self._optimizer.param_groups:
            group |= {
                "lr": params.learning_rate,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay,
            }
        try:
            self._optimizer.step()
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            return False
        return True

    def _everything(self) -> dict[str, Tensor]:
        """Return the matrices and the optimizer's entries of all of them."""
        found: dict[str, Tensor] = {}
        for name, value in self._parameters.items():
            entries = self._optimizer.state.get(value, {})
            found |= {name: value.detach()} | {f"{name}.{key}": entry for key, entry in entries.items()}
        return found

    @torch.no_grad()
    def _restore(self, before: Mapping[str, Tensor]) -> None:
        """Restore the result of `_everything`."""
        for name, value in self._everything().items():
            if name in before:
                value.copy_(before[name])
        for name, parameter in self._parameters.items():
            if f"{name}.{_STEP}" not in before:
                self._optimizer.state.pop(parameter, None)

    def state(self) -> dict[str, Tensor]:
        """Return moments, number of updates, and gradients since the last update, by `<parameter>.<name>`."""
        entries = {name: value for name, value in self._everything().items() if name not in self._parameters}
        return entries | {f"{name}.{_GRADIENT}": value for name, value in self._sums.items()}

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
