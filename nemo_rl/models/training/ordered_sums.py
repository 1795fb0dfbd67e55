"""Add gradients in the order of rows, so that their bits do not depend on microbatches and data-parallel ranks.

With `invariant_gradients`, each row is a microbatch, and ranks take turns in the order of rows: rank r of R computes
rows r, r + R, r + 2R ... (`data.packing.OneByOne`). Addition of floating-point numbers is not associative, so every
gradient is the sum of the rows' gradients from the first to the last row:

    one rank    FSDP2, or autograd without it, adds each row's gradient to the sum of the rows before
    R ranks     instead of the sum of R rows, `RankOrder` returns the sum so far, to which it adds R rows in rank order

The norm of the whole gradient is computed from whole tensors, because a sum of the norms of shards depends on how many
there are. Invariant: a zero gradient has a positive sign, since filler rows add zeros.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.utils.errors import ConfigError

KEY = "policy.invariant_gradients=true"


class RankOrder:
    """The sum of a group of gradients over all rows so far, which FSDP2 computes with each microbatch.

    It has the methods of torch's `ReduceScatter`.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor for gradients or their sums."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shards of the sum so far, with one more row of each rank.

        Args:
            output_tensor: `[n]` shards of this rank.
            input_tensor: `[R * n]` gradients of this rank's row, in the order of the ranks that shard them.
            group: the R ranks.
            op: always the sum (`parallelize.shard`).
            async_op: not used, the call returns after the transfer.
        """
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        for part in parts.chunk(group.size()):
            self._total = part.clone() if self._total is None else self._total.add_(part)
        assert self._total is not None and self._total.shape == output_tensor.shape, "rows train the same parameters"
        output_tensor.copy_(self._total)

    def forget(self) -> None:
        """Free the sum. The next row is the first one."""
        self._total = None


class OrderedSums:
    """The sums of all groups of parameters of a model that FSDP2 shards over several ranks.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: list[RankOrder] = []
        self._sharded: list[nn.Parameter] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                for group in state._fsdp_param_groups:
                    group._reduce_scatter_comm = RankOrder()
                    self._sums.append(group._reduce_scatter_comm)

    def start(self) -> None:
        """Begin an update. No parameter may be gathered, because gathered ones replace the parameters of the model."""
        self.forget()
        self._sharded = list(self._model.parameters())

    def next_row(self) -> None:
        """Drop the gradients before a backward pass, which gives the sums of all rows so far."""
        for parameter in self._sharded:
            parameter.grad = None

    def forget(self) -> None:
        """Free the sums after an update."""
        for each in self._sums:
            each.forget()


@torch.no_grad()
def ordered_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the joint 2-norm of gradients as a float64 scalar, which is the same for any number of shards.

    Every rank gathers one gradient at a time. Zeros become positive.
    """
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        gradient.add_(0.0)
        total += torch.linalg.vector_norm(whole(gradient).contiguous(), dtype=torch.float64).square().cpu()
    return total.sqrt()


def require_rows_alone(hf: PreTrainedModel, device: torch.device, *, has_auxiliary_loss: bool) -> None:
    """Check that nothing in a pass depends on random numbers of a rank, on other rows or on the order of threads.

    Args:
        has_auxiliary_loss: whether the routers of experts have a loss of all rows together.

    Raises:
        ConfigError: the device is not a CPU, the model drops elements, or it has an auxiliary loss.
    """
    if device.type != "cpu":
        raise ConfigError(f"{KEY} computes on CPUs only so far, and the device is {device}. Set it to false.")
    if has_auxiliary_loss:
        raise ConfigError(
            f"{KEY}: the auxiliary loss of experts is one of all rows together. Set "
            "policy.dtensor_cfg.moe_aux_loss_coeff=0."
        )
    dropped = [name for name, module in hf.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    config = hf.config.get_text_config()
    dropped += [name for name in vars(config) if name.endswith(("dropout", "pdrop")) and _is_positive(config, name)]
    if dropped:
        raise ConfigError(
            f"{KEY}: the model drops random elements, which differ by rank ({', '.join(sorted(dropped)[:5])}). Set "
            "these fields to 0 in policy.hf_config_overrides."
        )


def _is_positive(config: Any, name: str) -> bool:
    value = getattr(config, name)
    return isinstance(value, float) and value > 0
