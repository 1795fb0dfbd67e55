"""Update matrices by Muon and all other parameters by AdamW, on any mesh.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, which a few Newton-Schulz steps approximate.
`Muon` is `torch.optim.Muon` for parameters that are divided among ranks, and for stacks of matrices (experts), with
`torch.optim.AdamW` for the parameters that Muon cannot update. Momentum and weights stay on their ranks;
`distributed.ranks.whole_matrices` joins each matrix on one rank for the Newton-Schulz steps.

Invariant: the update is that of `torch.optim.Muon` on the undivided matrix. Plain matrices get the same bits. On
meshes, sums of gradients are rounded in another order, and Newton-Schulz steps in bfloat16 enlarge the difference.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), Liu et al. 2025 (arXiv:2502.16982).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload, override

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_rl.host.device import has_no_bfloat16

ORTHOGONAL = "orthogonal"
"""Key of a parameter group: whether Muon updates its parameters, or AdamW."""
SAME_RATE = "match_rms_adamw"
"""The `adjust_lr_fn` with which Muon and AdamW have the same learning rate."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MOST_STEPS = 99
"""The largest number of steps that `torch.optim.Muon` takes."""
_BYTES_AT_ONCE = 256 * 1024**2
"""Bytes of matrices that a rank joins at once, unless one matrix has more."""

type Settings = dict[str, Any]


class Muon(Optimizer):
    """Muon for matrices, and AdamW for other parameters.

    Args:
        params: parameter groups. A group's entry `orthogonal` says whether Muon or AdamW updates it.
        ns_dtype: dtype of the Newton-Schulz steps, `bfloat16` as in `torch.optim.Muon`, or `float32`. None is bfloat16,
            except on a processor that has no instructions for it (`host.device.has_no_bfloat16`).
        adamw: arguments of `torch.optim.AdamW`. Those that are missing are `lr` and `weight_decay` of Muon, and the
            defaults of AdamW.
        **muon: arguments of `torch.optim.Muon`.

    Raises:
        ValueError: an argument is out of its range, or AdamW has no learning rate of its own and Muon's does not fit.
    """

    def __init__(
        self,
        params: Sequence[Settings],
        ns_dtype: str | None = None,
        adamw: Mapping[str, Any] | None = None,
        **muon: Any,
    ) -> None:
        place = [nn.Parameter(torch.zeros(1, 1))]  # torch checks the arguments for it
        own = torch.optim.Muon(place, **muon).defaults
        ns_dtype = _dtype_of_steps(params) if ns_dtype is None else ns_dtype
        if ns_dtype not in _DTYPES:
            raise ValueError(f"ns_dtype={ns_dtype!r} is none of {', '.join(_DTYPES)}.")
        if not 1 <= own["ns_steps"] <= _MOST_STEPS:
            raise ValueError(f"ns_steps={own['ns_steps']} is not between 1 and {_MOST_STEPS}.")
        other = {**{name: own[name] for name in ("lr", "weight_decay")}, **(adamw or {})}
        if "lr" not in (adamw or {}) and own["adjust_lr_fn"] != SAME_RATE:
            raise ValueError(
                f"adamw has no lr. With adjust_lr_fn={own['adjust_lr_fn']}, lr={own['lr']:g} is the rate of orthogonal "
                f"matrices and too large for AdamW. Set adamw: {{lr: ...}}, or adjust_lr_fn={SAME_RATE} for one rate."
            )
        self._adamw = torch.optim.AdamW(place, **other)
        settings = {True: {**own, "ns_dtype": ns_dtype}, False: self._adamw.defaults}
        super().__init__([{**settings[group[ORTHOGONAL]], **group} for group in params], {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. The call is collective over the meshes of the parameters.

        Args:
            closure: computes the loss again, as in other optimizers of torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group[ORTHOGONAL]]
        self._adamw.step()
        for group in self.param_groups:
            if group[ORTHOGONAL]:
                self._update_matrices(group)
        return loss

    def _update_matrices(self, group: Settings) -> None:
        """Update momentum and weights of a group. A learning rate of 0 changes no weight."""
        from nemo_rl.distributed.ranks.placements import held_here  # slow to import, and not needed by AdamW
        from nemo_rl.distributed.ranks.whole_matrices import MatrixAxes

        rate, first = float(group["lr"]), 0
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.shape, getattr(parameter, "placements", None)].append(parameter)
        for (shape, _), parameters in alike.items():
            axes = MatrixAxes.of(parameters[0])
            whole = max(1, parameters[0].numel() * _DTYPES[group["ns_dtype"]].itemsize)
            at_once = axes.num_ranks * max(1, _BYTES_AT_ONCE // whole)
            adjusted = adjusted_rate(rate, group["adjust_lr_fn"], shape)
            for start in range(0, len(parameters), at_once):
                chosen = parameters[start : start + at_once]
                parts = torch.stack([self._momentum(parameter, group) for parameter in chosen])
                if rate == 0:
                    continue
                results = axes.apply(_function(group, len(shape)), parts.flatten(0, -3), first + start)
                for parameter, update in zip(chosen, results.view(parts.shape), strict=True):
                    weight = held_here(parameter)
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.add_(update.to(weight.device), alpha=-adjusted)
            first += len(parameters)

    def _momentum(self, parameter: nn.Parameter, group: Settings) -> Tensor:
        """Add the gradient to the momentum, and return this rank's part of what the Newton-Schulz steps get."""
        from nemo_rl.distributed.ranks.placements import held_here

        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        gradient, buffer = held_here(parameter.grad), held_here(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        mesh = getattr(parameter, "device_mesh", None)
        return update.to(update.device if mesh is None else mesh.device_type, _DTYPES[group["ns_dtype"]])


def _dtype_of_steps(groups: Sequence[Settings]) -> str:
    """Return the dtype in which the device of some parameters computes Newton-Schulz steps."""
    devices = {
        getattr(parameter, "device_mesh", None) or parameter.device for group in groups for parameter in group["params"]
    }
    kinds = {device.type if isinstance(device, torch.device) else device.device_type for device in devices}
    return "float32" if kinds <= {"cpu"} and has_no_bfloat16() else "bfloat16"


def _function(group: Settings, dims: int) -> Callable[[Tensor], Tensor]:
    """Return the function of `[K, m, n]` matrices that a group's settings describe. Experts are computed in one batch.

    Args:
        dims: number of dimensions of the parameters.
    """
    arguments = (group["ns_coefficients"], group["ns_steps"], group["eps"])
    if dims > 2:
        return lambda matrices: orthogonal(matrices, *arguments)
    return lambda matrices: torch.stack([orthogonal(matrix, *arguments) for matrix in matrices])


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return approximations of the nearest orthogonal matrices, with singular values of about 0.7 to 1.2.

    Args:
        matrices: `[m, n]` or `[K, m, n]`. One matrix gets the same operations as in `torch.optim.Muon`.
        coefficients: a, b and c of the Newton-Schulz step `X <- a X + (b A + c A^2) X`, where `A = X X^T`.
        steps: number of steps.
        eps: smallest norm by which a matrix is divided.
    """
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    fused = torch.addmm if x.dim() == 2 else torch.baddbmm
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted_rate(rate: float, how: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix, whose last two dimensions are rows and columns, as in `torch.optim.Muon`.

    Args:
        how: the argument `adjust_lr_fn` of `Muon`.
    """
    rows, columns = shape[-2:]
    if how == SAME_RATE:
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1, rows / columns))
