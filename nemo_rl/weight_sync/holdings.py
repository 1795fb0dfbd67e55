"""Describe the blocks of the weights that a trainer rank holds, and read their values.

A rank describes all of its weights at once and reads them one after another, so that a sync holds few converted
tensors. Invariant: of a tensor, the blocks of two ranks are equal or disjoint, and all of them together are the tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_rl.weight_sync.parts import Part, whole


@dataclass(frozen=True)
class Held:
    """A weight of which a rank holds blocks."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Torch dtype in which it is sent, without its prefix, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    order: tuple[int, ...]
    """Place in the stream; the same on all ranks that hold some of the weight."""
    blocks: tuple[Part, ...]
    """Places of the rank's blocks in the tensor."""


class HeldWeights(Protocol):
    """The weights of a rank, or its part of them."""

    @property
    def device(self) -> torch.device:
        """Device of the values."""

    def described(self) -> Sequence[Held]:
        """Return the weights in the order of the stream."""

    def values(self) -> Iterator[list[torch.Tensor]]:
        """Yield the values of the blocks of each weight of `described`, in its order.

        Ranks that together compute a value do so when they reach it, so all ranks exhaust the iterator.
        """


@dataclass(frozen=True)
class Readable:
    """A weight and how to read it."""

    held: Held
    read: Callable[[], list[torch.Tensor]]
    """Returns the values of its blocks."""


class ReadableWeights:
    """Weights that are read one by one; see `HeldWeights`.

    Args:
        weights: the weights, in any order.
        finish: called when all have been read.
    """

    def __init__(
        self, weights: Iterable[Readable], device: torch.device, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._weights = sorted(weights, key=lambda weight: weight.held.order)
        self._finish = finish
        self.device = device

    def described(self) -> Sequence[Held]:
        """See `HeldWeights.described`."""
        return [weight.held for weight in self._weights]

    def values(self) -> Iterator[list[torch.Tensor]]:
        """See `HeldWeights.values`."""
        for weight in self._weights:
            yield weight.read()
        self._finish()


class WholeWeights:
    """Tensors that this rank holds whole; see `HeldWeights`.

    Args:
        iterate: yields name and tensor; called once for each stream, and before the first one to describe them.
        device: device of the tensors.
    """

    def __init__(
        self,
        iterate: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._iterate = iterate
        self._described: list[Held] = []
        self.device = device

    def described(self) -> Sequence[Held]:
        """See `HeldWeights.described`."""
        if not self._described:
            named = enumerate(self._iterate())
            self._described = [_whole(name, tensor, number) for number, (name, tensor) in named]
        return self._described

    def values(self) -> Iterator[list[torch.Tensor]]:
        """See `HeldWeights.values`."""
        for _, tensor in self._iterate():
            yield [tensor]


def _whole(name: str, tensor: torch.Tensor, number: int) -> Held:
    shape = tuple(tensor.shape)
    return Held(name, dtype_name(tensor.dtype), shape, (number,), (whole(shape),))


def block_of(tensor: torch.Tensor) -> Part:
    """Return the place of this rank's block in a tensor.

    The last axis of a mesh divides first, as `placements.whole` describes: FSDP divides what tensor and expert
    parallelism leave, in chunks as `torch.chunk` makes them.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and the controller imports this file

    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis in reversed(range(mesh.ndim)):
            placement: Any = tensor.placements[axis]  # FSDP's strided shards are no subclass of `Shard`
            if not placement.is_replicate():
                dim, size = placement.dim, sizes[placement.dim]
                chunk = -(-size // mesh.size(axis))
                first = min(size, chunk * mesh.get_local_rank(axis))
                starts[dim], sizes[dim] = starts[dim] + first, min(chunk, size - first)
    return Part(tuple(starts), tuple(sizes))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its prefix, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
