"""Divide the experts of mixture-of-experts layers among ranks, in place.

In transformers, one module holds all experts of a layer in fused parameters `[E, ...]` and is called as
`experts(hidden [N, D], top_k_index [N, k], top_k_weights [N, k])`. Each rank keeps `E / ranks` experts, and runs the
model's own forward on them (its activation, limits, biases and grouped matrix products). There are two ways:

    divide_over_tensor_ranks    every rank has all tokens; it sums the outputs of its own experts
    dispatch_over_expert_ranks  every rank has different tokens; each token goes to the ranks of its experts, and back

Invariant: all ranks enter the same collectives in the same order, even a rank without tokens, also when the forward
pass is recomputed. Experts without tokens get a gradient of zeros, because FSDP2 skips the reduction of a parameter
without a gradient, and other ranks would wait for this rank forever.

Source of the dispatch: GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2), without capacities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks import collectives
from nemo_rl.distributed.ranks.placements import as_sharded, computing_with, held_here
from nemo_rl.utils.errors import ConfigError

_OWN_FORWARD = "_is_expert_parallel"
"""Attribute that `transformers.integrations.moe.use_experts_implementation` gives to modules of experts."""


def find_experts(hf: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts that can be divided, by name."""
    return {name: module for name, module in hf.named_modules() if _is_fused(module)}


def _is_fused(module: nn.Module) -> bool:
    if not hasattr(module, _OWN_FORWARD):
        return False
    return all(parameter.shape[0] == _num_own(module) for parameter in module.parameters())


def require_experts(hf: PreTrainedModel, ranks: int, key: str = "expert_parallel_size") -> dict[str, nn.Module]:
    """Return `find_experts` of a model. Raise an error if its experts cannot be divided among the ranks.

    Args:
        hf: the model, with all its experts.
        ranks: number of ranks that divide the experts.
        key: the key of `policy.dtensor_cfg` that sets `ranks`, for messages.

    Raises:
        ConfigError: the model has no such experts, or `ranks` does not divide their number.
    """
    found = find_experts(hf)
    if not found:
        raise ConfigError(
            f"policy.dtensor_cfg.{key}={ranks}: {type(hf).__name__} has no experts that can be shared. They must be "
            "in fused parameters with one row per expert, in a module that transformers marks by "
            f"use_experts_implementation. Set policy.dtensor_cfg.{key}=1."
        )
    for name, experts in found.items():
        number = num_experts(experts)
        if number % ranks:
            valid = [size for size in range(1, number + 1) if number % size == 0]
            nearest = min(valid, key=lambda size: abs(size - ranks))
            raise ConfigError(
                f"policy.dtensor_cfg.{key}={ranks} does not divide the {number} experts of {name}: "
                f"{number} / {ranks} = {number / ranks:.4g}. Nearest value: {nearest}."
            )
    return found


def num_experts(experts: nn.Module) -> int:
    """Return the number of experts of a layer, on all ranks together."""
    return next(experts.parameters()).shape[0]


def _num_own(experts: nn.Module) -> int:
    """Return the number of experts of a layer on this rank, which the model's own forward uses."""
    number: Any = experts.num_experts
    return int(number)


def divide_over_tensor_ranks(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts, and compute their contribution to the outputs of all tokens.

    Use this for the MLP block of a decoder layer under tensor parallelism. Input and routing are equal on all ranks.
    The block's output is the sum over the ranks, and so are the gradients of hidden states and routing weights.

    Args:
        experts: a module from `find_experts`; parameters may be on the meta device.
        mesh: the ranks that have the same tokens; one axis.
    """
    _keep_own(experts, mesh)
    forward: Any = partial(_run_own_experts, experts.forward, experts, mesh.get_local_rank())
    experts.forward = forward


def dispatch_over_expert_ranks(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts, and send each token to the ranks of its experts.

    Input, routing and output are those of this rank's tokens. The router and shared experts are not divided. Their
    gradients must be summed over all ranks with different tokens. If tensor-parallel ranks have the same tokens, wrap
    the block with `divide_tokens`.

    Args:
        experts: a module from `find_experts`; parameters may be on the meta device.
        mesh: the ranks that divide the experts; one axis.
    """
    _keep_own(experts, mesh)
    forward: Any = partial(_run_dispatched, experts.forward, experts, mesh.get_group())
    experts.forward = forward


def divide_tokens(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Make each tensor-parallel rank run a block only on its part of the sequence.

    For a block whose experts are dispatched (`tensor_parallel` divides others). Its input and output `[b, T, D]` and
    their gradients are equal on all ranks. Inside, each rank runs the router and shared experts on its own tokens, so
    their gradients must be summed over ranks. Do not use this with sequence parallelism, which already divides tokens.

    Args:
        block: takes and returns hidden states, or a tuple that begins with them.
        group: the tensor-parallel ranks.
    """
    forward: Any = partial(_run_on_part, block.forward, group)
    block.forward = forward


def shard_experts(
    experts: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | None = None,
) -> None:
    """Shard dispatched experts with FSDP2 too, over the ranks that hold the same experts.

    Args:
        experts: a module after `dispatch_over_expert_ranks`.
        mesh: `Meshes.expert_fsdp`.
        precision: mixed-precision policy of the layer; routing weights keep their own dtype.
        offload: offload policy of the layer.
        reshard_after_forward: argument of `fully_shard`.
    """
    fully_shard(
        experts,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=partial(_placement, mesh.size(-1)),
        mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, None, cast_forward_inputs=False),
        offload_policy=offload,
    )


def _placement(shards: int, parameter: nn.Parameter) -> Shard:
    """Shard a parameter along the first dimension that divides evenly, or along dimension 0 if there is none.

    FSDP2 can pad dimension 0 only. If a rank has fewer experts than shards, padding would make shards empty.
    """
    assert isinstance(parameter, DTensor), "experts are shared before they are sharded"
    sizes = parameter.to_local().shape
    return Shard(next((dim for dim, size in enumerate(sizes) if size % shards == 0), 0))


def _keep_own(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters with DTensors of this rank's experts, without communication."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        experts._parameters[name] = as_sharded(parameter, Shard(0), mesh)
    own_number: Any = num_experts(experts) // mesh.size()
    experts.num_experts = own_number


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a token and one of its experts, ordered by expert and then by token."""

    places: Tensor
    """`[N * k]` index of each pair in the flattened `top_k_index`."""
    counts: Tensor
    """`[E]` number of pairs of each expert."""

    @classmethod
    def of(cls, top_k_index: Tensor, number: int) -> "_Pairs":
        flat = top_k_index.flatten()
        return cls(flat.argsort(stable=True), torch.bincount(flat, minlength=number))


def _run_own_experts(
    forward: Callable[..., Tensor],
    experts: nn.Module,
    rank: int,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    pairs = _Pairs.of(top_k_index, num_experts(experts))
    counts = pairs.counts.view(-1, _num_own(experts))
    first, length = torch.stack([counts[:rank].sum(), counts[rank].sum()]).tolist()
    places = pairs.places[first : first + length]
    results = _compute(forward, experts, hidden[places // top_k_index.shape[1]], counts[rank])
    return _weighted_sum(results, places, top_k_weights)


def _run_dispatched(
    forward: Callable[..., Tensor],
    experts: nn.Module,
    group: dist.ProcessGroup,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    pairs = _Pairs.of(top_k_index, num_experts(experts))
    counts = torch.empty_like(pairs.counts)
    dist.all_to_all_single(counts, pairs.counts, group=group)
    by_rank = (dist.get_world_size(group), _num_own(experts))
    send, receive = torch.stack([pairs.counts.view(by_rank).sum(1), counts.view(by_rank).sum(1)]).tolist()
    rows = collectives.all_to_all(hidden[pairs.places // top_k_index.shape[1]], send, receive, group)
    results = _compute(forward, experts, rows, counts)
    results = collectives.all_to_all(results, receive, send, group)
    return _weighted_sum(results, pairs.places, top_k_weights)


def _compute(forward: Callable[..., Tensor], experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """Run this rank's experts.

    Returns:
        `[R, D]` outputs, not weighted.
    """
    own_rows = {name: held_here(parameter) for name, parameter in experts.named_parameters(recurse=False)}
    with computing_with(experts, own_rows):
        if not len(rows):
            return _NoTokens.apply(rows, *experts.parameters())
        own = torch.arange(_num_own(experts), device=rows.device)
        index = own.repeat(len(counts) // len(own))
        index = index.repeat_interleave(counts, output_size=len(rows))
        return forward(rows, index[:, None], rows.new_ones(len(rows), 1))


def _weighted_sum(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum `[N, D]` of each token's results. Pairs without a result count as zero.

    The sum over a dimension is used instead of an indexed addition, whose order is not fixed on GPUs.
    """
    every = results.new_zeros((weights.numel(), results.shape[1])).index_copy(0, places, results)
    return (every.view(*weights.shape, -1) * weights[..., None]).sum(1).to(results.dtype)


def _run_on_part(
    forward: Callable[..., Any], group: dist.ProcessGroup, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    length = hidden_states.shape[1]
    padded = nn.functional.pad(hidden_states, (0, 0, 0, -length % dist.get_world_size(group)))
    output = forward(collectives.split(padded, 1, group), *args, **kwargs)
    hidden, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
    hidden = collectives.all_gather(hidden, 1, group, partial_gradient=False)[:, :length]
    return hidden if rest is None else (hidden, *rest)


class _NoTokens(torch.autograd.Function):
    """Return the empty output of experts without tokens. The gradients of their parameters are zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grad, *(torch.zeros_like(parameter) if asked else None for parameter, asked in needed)
