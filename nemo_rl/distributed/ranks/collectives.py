"""Define collectives of a forward pass, each with the backward pass for its correct gradient.

Tensor, sequence, context and expert parallelism use these. The gradient of a tensor on a rank is `whole` if every rank
has the same complete gradient, and `partial` if the complete gradient is the sum over ranks. This determines the
correct function. Invariant: a function of a tensor that is equal on all ranks returns a whole gradient, unless its name
or its argument says partial. If the group is None, there is one rank, and the tensor is returned unchanged.

Source: Megatron-LM's f and g (Shoeybi et al. 2019, arXiv:1909.08053, section 3), and their sequence-parallel forms
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

type Group = dist.ProcessGroup | None


def reduce_gradient(x: Tensor, group: Group) -> Tensor:
    """Return the tensor unchanged, and sum its partial gradients over the ranks (Megatron's f)."""
    return x if group is None else _ReduceGradient.apply(x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks. Every term gets the whole gradient of the sum (Megatron's g)."""
    return x if group is None else _AllReduce.apply(x, group)


def all_gather(x: Tensor, dim: int, group: Group, *, partial_gradient: bool) -> Tensor:
    """Join the equal-shaped parts of all ranks in rank order along `dim`.

    Args:
        x: this rank's part.
        dim: dimension along which the parts are joined.
        partial_gradient: sum the gradient of the result over the ranks before each rank takes its part.
    """
    return x if group is None else _AllGather.apply(x, dim, group, partial_gradient)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks. Its gradient is gathered."""
    return x if group is None else _ReduceScatter.apply(x, dim, group)


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along `dim` of a tensor that is equal on all ranks. Its whole gradient is gathered."""
    return x if group is None else _Split.apply(x, dim, group)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send `send[r]` rows to each rank r, and return the `receive[r]` rows from each rank, in rank order.

    Args:
        x: `[sum(send), ...]`.
        send: rows for each rank.
        receive: rows from each rank.
    """
    return x if group is None else _AllToAll.apply(x, list(send), list(receive), group)


def part_of(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's equal-sized part along `dim`, as a view."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Gather into one tensor. With a list of tensors, NCCL would copy every part again."""
    dim %= x.dim()
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim % x.dim(), 0).contiguous()
    mine = torch.empty_like(parts[0])
    if x.device.type == "cpu":  # with one tensor, gloo adds in another order
        dist.reduce_scatter(mine, list(parts), group=group)
    else:
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group)
    return mine


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _summed(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, partial_gradient: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.partial = dim, group, partial_gradient
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        take = _reduce_scattered if ctx.partial else part_of
        return take(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return part_of(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchanged(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _exchanged(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchanged(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    got = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(got, x.contiguous(), receive, send, group=group)
    return got
