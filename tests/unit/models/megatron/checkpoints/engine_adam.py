"""Imitate Transformer Engine's FusedAdam on CPUs: the states, names, dtypes and assertions that it documents.

Source: the docstrings and assertions of `transformer_engine.pytorch.optimizers.FusedAdam`, release 2. With
`store_param_remainders` each float32 weight is a bfloat16 weight and an int16: `(bits << 16) + remainder` are its bits.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW that holds its own state: `exp_avg`, `exp_avg_sq` and `master_param`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}, "the stand-in knows no other"
        assert bias_correction and adam_w_mode and not capturable
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights

    def _has_remainders(self, parameter: Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and parameter.dtype is torch.bfloat16

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return the state as it is stored: int16 for remainders."""
        state = self.state[param][state_name]
        assert state.dtype is (torch.int16 if self._has_remainders(param, state_name) else torch.float32)
        return state

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Copy a state in; assert its dtype."""
        remainders = self._has_remainders(param, state_name)
        assert unscaled_state.dtype is (torch.int16 if remainders else torch.float32)
        if state_name not in self.state[param]:
            self.state[param][state_name] = torch.zeros_like(param, dtype=unscaled_state.dtype)
        self.state[param][state_name].copy_(unscaled_state)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Set moments of zero, and the float32 weight equal to the weight."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)
        if self.master_weights and store_param_remainders:
            self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            self.state[param]["master_param"] = param.detach().float().clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch, with the values of `get_unscaled_state`."""
        found = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in found["state"].items():
            found["state"][index] = {name: self.get_unscaled_state(parameters[index], name) for name in state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, but each state in its own dtype."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[parameters[index]] = {}
            for name, value in state.items():
                kept = value if self._has_remainders(parameters[index], name) else value.float()
                self.set_scaled_state(parameters[index], name, kept)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> None:
        """Update the float32 weights; their rounded values become the parameters."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, self._has_remainders(parameter, "master_param"))
                gradient = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), step = self.state[parameter], group["betas"], group["step"]
        remainders = self._has_remainders(parameter, "master_param")
        has_master = self.master_weights and parameter.dtype is not torch.float32
        master = parameter.data
        if has_master:
            master = joined(parameter, state["master_param"]) if remainders else state["master_param"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
        master.sub_(group["lr"] * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * master))
        if remainders:
            rounded, rest = divided(master)
            parameter.copy_(rounded)
            state["master_param"].copy_(rest)
        elif has_master:
            parameter.copy_(master)


def joined(rounded: Tensor, remainders: Tensor) -> Tensor:
    """Return float32 weights from bfloat16 weights and int16 remainders."""
    bits = (rounded.view(torch.int16).to(torch.int32) << 16) + remainders.to(torch.int32)
    return bits.view(torch.float32)


def divided(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 weights (halves away from zero) and int16 remainders: the inverse of `joined`."""
    bits = weights.view(torch.int32)
    remainders = bits.to(torch.int16)  # the lower 16 bits, with a sign
    high = ((bits - remainders.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), remainders


@contextmanager
def engine_adam() -> Iterator[None]:
    """Set up Megatron Core and this library as on a GPU with Transformer Engine, as far as optimizers go."""
    import megatron.core.optimizer as core
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from nemo_rl.models.megatron import optimizer

    module: Any = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    parents = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    with (
        patch.dict(sys.modules, parents | {module.__name__: module}),
        patch.multiple(core, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False, is_te_min_version=lambda *_: True),
        patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True, create=True),
        patch.object(optimizer_config, "is_te_min_version", lambda *_: True),
        patch.multiple(optimizer, is_on_gpu=lambda chunks: True, find_spec=lambda name: object()),
    ):
        yield
