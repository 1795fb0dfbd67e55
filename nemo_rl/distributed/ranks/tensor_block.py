"""Describe blocks of tensors: the location of a block in a whole tensor, and the block of this rank.

Shards, reads of files, weight syncs and fingerprints describe a part of a tensor with the same type. Invariant: a
block of a shard of a DTensor has the starts and the shape of the rank's local tensor.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor, with `shape[d]` indices of each dimension `d`, starting at `starts[d]`."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index of the tensor."""
        return tuple(slice(start, end) for start, end in zip(self.starts, self._ends, strict=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block of a tensor as a view."""
        for dim, (start, size) in enumerate(zip(self.starts, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def around(self, other: "TensorBlock") -> "TensorBlock":
        """Return the smallest block that contains this one and another one."""
        starts = tuple(map(min, self.starts, other.starts))
        ends = map(max, self._ends, other._ends)
        return TensorBlock(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def common(self, other: "TensorBlock") -> "TensorBlock":
        """Return the intersection with another block. It is empty if they have no common elements."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, self._ends, other._ends)
        return TensorBlock(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def inside(self, outer: "TensorBlock") -> "TensorBlock":
        """Return the location of this block in a block that contains it."""
        starts = tuple(start - first for start, first in zip(self.starts, outer.starts, strict=True))
        return TensorBlock(starts, self.shape)

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.shape, strict=True))


def whole_block(shape: Iterable[int]) -> TensorBlock:
    """Return the block that covers a whole tensor of a shape."""
    shape = tuple(shape)
    return TensorBlock((0,) * len(shape), shape)


def block_here(tensor: torch.Tensor) -> TensorBlock:
    """Return the block that this rank holds of a tensor. It is the whole tensor if this is not a DTensor."""
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, dim, size in divided_dims(tensor):
        if dim is not None:
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            start, sizes[dim] = chunk_of(size, mesh.size(axis), mesh.get_local_rank(axis))
            starts[dim] += start
    return TensorBlock(tuple(starts), tuple(sizes))


def divided_dims(tensor: torch.Tensor) -> list[tuple[int, int | None, int]]:
    """Return the axes of a DTensor's mesh in the order in which they divide it. Another tensor has no axes.

    The axes, from first to last, divide a dimension into chunks like `torch.chunk`. FSDP divides after that, because it
    divides the results of tensor and expert parallelism.

    Returns:
        For each axis, its number, the dimension that it divides, and the size of this dimension before. The dimension
        is None, and the size 0, if the ranks of the axis hold copies.
    """
    from torch.distributed.tensor import DTensor, Shard  # slow to import, and the controller imports this file

    found: list[tuple[int, int | None, int]] = []
    if isinstance(tensor, DTensor):
        mesh, placements, sizes = tensor.device_mesh, list[Any](tensor.placements), list(tensor.shape)
        # FSDP's placement is not a subclass of `Shard` if another axis divides the same dimension.
        for axis in sorted(range(len(placements)), key=lambda axis: not isinstance(placements[axis], Shard)):
            dim = getattr(placements[axis], "dim", None)
            found.append((axis, dim, 0 if dim is None else sizes[dim]))
            if dim is not None:
                _, sizes[dim] = chunk_of(sizes[dim], mesh.size(axis), mesh.get_local_rank(axis))
    return found


def chunk_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return start and length of a rank's part of a dimension that `torch.chunk` divides. It may be empty."""
    chunk = -(-size // ranks)
    start = min(size, chunk * rank)
    return start, min(chunk, size - start)
