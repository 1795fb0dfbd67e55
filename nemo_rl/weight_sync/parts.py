"""Find the parts of tensors that an engine's loaders read and that a trainer rank holds.

`ReadRecorder` finds the parts of a checkpoint's tensors that the loaders of an engine's worker read. An engine with
several workers divides its layers in ways that only its own code defines: rows, columns, fused projections, experts,
stages, padded vocabularies. The recorder watches the operations on the loaders' tensors, so it does not depend on the
model. Invariant: the recorded parts contain every element that was read.

`HeldWeights` describes the blocks of weights that a trainer rank holds, and reads their values. A rank describes all of
its weights at once and reads them one after another, so that few converted tensors are in memory. Invariant: the blocks
of a tensor on two ranks are equal or disjoint, and the blocks of all ranks together are the whole tensor.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block

_MOST_PARTS = 16
"""Largest number of parts of a tensor. If more are read, the smallest block that contains all of them is used."""


BlocksByName = dict[str, tuple[TensorBlock, ...]]
"""Parts of tensors by Hugging Face name. Names of tensors without parts may be missing."""


def add_block(parts: tuple[TensorBlock, ...], new: TensorBlock) -> tuple[TensorBlock, ...]:
    """Add a part to disjoint parts. Join parts that overlap or that form one block together."""
    for held in parts:
        joined = held.around(new)
        overlap = held.common(new).numel
        if overlap or joined.numel == held.numel + new.numel:
            if joined.numel == held.numel:
                return parts
            return add_block(tuple(part for part in parts if part is not held), joined)
    if len(parts) < _MOST_PARTS:
        return (*parts, new)
    for held in parts:
        new = new.around(held)
    return (new,)


def block_of_view(shape: tuple[int, ...], offset: int, view: torch.Tensor) -> TensorBlock:
    """Return a block of a contiguous tensor that contains all elements of a view of the tensor.

    Args:
        offset: index of the tensor's first element in its storage.
        view: the view, which may have any strides.

    Returns:
        The block with exactly the view's elements if there is one. Otherwise, whole rows of the first dimension.
    """
    if not shape:
        return whole_block(shape)
    first = int(view.storage_offset()) - offset
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    starts, ends = _index(first, shape), _index(last, shape)
    sizes = tuple(end - start + 1 for start, end in zip(starts, ends, strict=True))
    if min(sizes) > 0 and math.prod(sizes) == view.numel() and _follows(view, sizes, shape):
        return TensorBlock(starts, sizes)
    return TensorBlock((starts[0],) + (0,) * (len(shape) - 1), (ends[0] - starts[0] + 1, *shape[1:]))


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index, in every dimension, of the element at a flat position of a contiguous tensor."""
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def _follows(view: torch.Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a view has the elements of a block of the given sizes in a contiguous tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return _merged(zip(strides, sizes, strict=True)) == _merged(zip(view.stride(), view.shape, strict=True))


def _merged(steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return dimensions as pairs (stride, size), sorted by stride. Contiguous adjacent dimensions are joined."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(steps):
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


class ReadRecorder(TorchDispatchMode):
    """Record which parts of watched tensors are read while the mode is active.

    An operation that makes a view reads nothing. Every other operation on a view reads all of its elements. Reads
    without PyTorch's operations are not noticed, so the result must be tested before it is used (`lanes`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: BlocksByName = {}
        """Parts that were read, by tensor name. Tensors that were not read are missing."""
        self._watched: dict[int, tuple[StorageWeakRef, str, tuple[int, ...], int]] = {}

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record reads of these tensors as long as they exist. Tensors must be contiguous, each in its own storage."""
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            of_tensor = (StorageWeakRef(storage), name, tuple(tensor.shape), int(tensor.storage_offset()))
            self._watched[storage.data_ptr()] = of_tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the watched tensors that an operation reads, and run the operation."""
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and value.numel():
                    self._note(value)
        return func(*args, **(kwargs or {}))

    def _note(self, view: torch.Tensor) -> None:
        of_tensor = self._watched.get(view.untyped_storage().data_ptr())
        if of_tensor is None or of_tensor[0].expired():
            return
        _, name, shape, offset = of_tensor
        part = block_of_view(shape, offset, view)
        self.reads[name] = add_block(self.reads.get(name, ()), part)


@dataclass(frozen=True)
class Held:
    """Description of a weight that a rank holds blocks of."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Torch dtype of the sent weight without its prefix, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    order: tuple[int, ...]
    """Sort key of the weight in the stream, equal on all ranks that hold blocks of the weight."""
    blocks: tuple[TensorBlock, ...]
    """Locations of the rank's blocks in the tensor."""


class HeldWeights(Protocol):
    """Interface of the weights that a rank holds blocks of."""

    @property
    def device(self) -> torch.device:
        """Device of the values."""

    def described(self) -> Sequence[Held]:
        """Return the descriptions of the weights, in stream order."""

    def values(self) -> Iterator[list[torch.Tensor]]:
        """Yield the values of the blocks of each weight, in the order of `described`.

        All ranks must exhaust the iterator, because several ranks may compute a value together.
        """


@dataclass(frozen=True)
class Readable:
    """A weight, and a function that reads it."""

    held: Held
    read: Callable[[], list[torch.Tensor]]
    """Function that returns the values of the weight's blocks."""


class SharedReads[K: Hashable]:
    """Read each of several tensors once for all of its blocks, and keep the tensors until the last block is read.

    Args:
        uses: number of blocks of all tensors together.
    """

    def __init__(self, read: Callable[[K], torch.Tensor], uses: int) -> None:
        self._read, self._uses, self._left = read, uses, uses
        self._kept: dict[K, torch.Tensor] = {}

    def of(self, key: K) -> torch.Tensor:
        """Return the tensor of one block. Call this once for each block."""
        if key not in self._kept:
            self._kept[key] = self._read(key)
        found = self._kept[key]
        self._left -= 1
        if self._left == 0:
            self._kept, self._left = {}, self._uses
        return found


class ReadableWeights:
    """Weights that are read one by one (`HeldWeights`).

    Args:
        weights: the weights, in any order.
        finish: function that is called when all weights have been read.
    """

    def __init__(
        self, weights: Iterable[Readable], device: torch.device, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._weights = sorted(weights, key=lambda weight: weight.held.order)
        self._finish = finish
        self.device = device

    def described(self) -> Sequence[Held]:
        """Describe the tensors (`HeldWeights.described`)."""
        return [weight.held for weight in self._weights]

    def values(self) -> Iterator[list[torch.Tensor]]:
        """Return the values of the tensors (`HeldWeights.values`)."""
        for weight in self._weights:
            yield weight.read()
        self._finish()


class WholeWeights:
    """Weights that this rank holds as whole tensors (`HeldWeights`).

    Args:
        iterate: yields names and tensors. It is called once for each stream, and once before for the descriptions.
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
        """Describe the tensors (`HeldWeights.described`)."""
        if not self._described:
            named = enumerate(self._iterate())
            self._described = [_whole(name, tensor, number) for number, (name, tensor) in named]
        return self._described

    def values(self) -> Iterator[list[torch.Tensor]]:
        """Return the values of the tensors (`HeldWeights.values`)."""
        for _, tensor in self._iterate():
            yield [tensor]


def _whole(name: str, tensor: torch.Tensor, number: int) -> Held:
    shape = tuple(tensor.shape)
    return Held(name, dtype_name(tensor.dtype), shape, (number,), (whole_block(shape),))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its prefix, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
