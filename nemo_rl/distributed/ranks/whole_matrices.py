"""Compute functions of whole matrices whose parts are on several ranks, each matrix on one rank.

FSDP and tensor parallelism store parts of matrices. `MatrixAxes.apply` gets the parts of several matrices of one shape.
It sends all parts of a matrix to one rank, so that each rank joins about as many matrices as the others, computes the
function there, and sends the parts of the result back. The ranks thus divide the work, and no rank holds all matrices.

Each axis of a mesh is one step. An axis that shards a dimension of the matrices exchanges parts. An axis with copies of
the parts only divides the matrices, and exchanges the results. An axis that divides a stack of matrices (experts) needs
no communication. Invariant: a joined matrix has the elements of the whole tensor in their order, on any mesh.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.ranks import collectives
from nemo_rl.distributed.ranks.tensor_block import chunk_of, divided_dims

type OfMatrices = Callable[[Tensor], Tensor]
"""Function from `[K, m, n]` matrices to `[K, m, n]` results."""


@dataclass(frozen=True)
class _Axis:
    """Ranks that hold parts of the same matrices, or copies of them."""

    group: dist.ProcessGroup
    rank: int
    """Number of this rank in the group."""
    dim: int | None
    """Dimension of the stack `[K, m, n]` that the ranks divide, 1 or 2; None for copies."""
    lengths: tuple[int, ...]
    """Length of each rank's part along `dim`. Zeros for copies."""

    def numbers(self, total: int, first: int) -> list[int]:
        """Return how many of `total` matrices each rank joins. Rank `first` is the first to get one of the rest."""
        size = len(self.lengths)
        return [total // size + ((rank - first) % size < total % size) for rank in range(size)]

    def join(self, parts: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return the matrices of this rank, `[numbers[rank], m, n]`, from its parts of all matrices."""
        if self.dim is None:
            return parts.split(list(numbers))[self.rank]
        shapes = [self._shape(parts, numbers[self.rank], length) for length in self.lengths]
        send = [number * parts[0].numel() for number in numbers]
        found = self._exchange(parts.flatten(), send, [math.prod(shape) for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(found, shapes, strict=True)], self.dim)

    def divide(self, results: Tensor, like: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return this rank's parts of the results of all ranks, with the shape of its parts of the matrices."""
        receive = [number * like[0].numel() for number in numbers]
        pieces = [results] * len(numbers) if self.dim is None else results.split(list(self.lengths), self.dim)
        flat = torch.cat([piece.flatten() for piece in pieces])
        found = self._exchange(flat, [piece.numel() for piece in pieces], receive)
        return torch.cat(found).view(like.shape)

    def _exchange(self, flat: Tensor, send: list[int], receive: list[int]) -> list[Tensor]:
        return list(collectives.all_to_all(flat, send, receive, self.group).split(receive))

    def _shape(self, parts: Tensor, number: int, length: int) -> tuple[int, ...]:
        shape = [number, *parts.shape[1:]]
        shape[self.dim or 0] = length
        return tuple(shape)


@dataclass(frozen=True)
class MatrixAxes:
    """The axes of a mesh over which parts or copies of matrices are spread, in the order in which they are joined."""

    axes: tuple[_Axis, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> "MatrixAxes":
        """Return the axes of a `[m, n]` matrix or an `[E, m, n]` stack of matrices, which may be a DTensor."""
        if not isinstance(tensor, DTensor):
            return cls()
        mesh, found = tensor.device_mesh, []
        stacked = tensor.dim() - 2
        for axis, dim, size in divided_dims(tensor):
            if mesh.size(axis) > 1 and (dim is None or dim >= stacked):
                lengths = tuple(chunk_of(size, mesh.size(axis), rank)[1] for rank in range(mesh.size(axis)))
                place = None if dim is None else dim - stacked + 1
                found.append(_Axis(mesh.get_group(axis), mesh.get_local_rank(axis), place, lengths))
        return cls(tuple(reversed(found)))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that divide the work."""
        return math.prod(len(axis.lengths) for axis in self.axes)

    def apply(self, function: OfMatrices, parts: Tensor, first: int = 0) -> Tensor:
        """Return this rank's parts of a function of whole matrices. The call is collective over the axes.

        Args:
            function: computes each matrix independently of the others, and keeps the dtype. It is not called for zero
                matrices.
            parts: `[K, m / ranks, n / ranks]` parts of K matrices, on the device of the mesh.
            first: number of matrices in earlier calls, so that ranks get the rest of a division in turns.

        Returns:
            Results of the shape and dtype of `parts`.
        """
        if not len(parts):  # then no rank of the remaining axes has any
            return parts
        if not self.axes:
            return function(parts)
        axis, inner = self.axes[0], MatrixAxes(self.axes[1:])
        numbers = axis.numbers(len(parts), first)
        mine = axis.join(parts, numbers)
        return axis.divide(inner.apply(function, mine, first), parts, numbers)
