"""Parts of tensors, as an engine's loaders read them and as a trainer rank holds them.

Describe parts of tensors, and find out which parts of a checkpoint's tensors an engine's loaders read. An engine of
several ranks divides its layers in ways that only its own code knows: rows, columns, fused projections, experts,
stages, padded vocabularies. `ReadRecorder` watches the operations on the tensors that the loaders are given, so the
result needs no knowledge of any model. Invariant: a recorded part contains every element that was read.

Describe the blocks of the weights that a trainer rank holds, and read their values. A rank describes all of its weights
at once and reads them one after another, so that a sync holds few converted tensors. Invariant: of a tensor, the blocks
of two ranks are equal or disjoint, and all of them together are the tensor.
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
"""Parts of one tensor; if more are read, the smallest part that contains all of them is used."""


BlocksByName = dict[str, tuple[TensorBlock, ...]]
"""Parts of tensors by Hugging Face name; of a tensor that is not read, none."""


def add_block(parts: tuple[TensorBlock, ...], new: TensorBlock) -> tuple[TensorBlock, ...]:
    """Add a part to disjoint ones, and join those that together are one block or overlap."""
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
    """Return a part of a contiguous tensor that contains all elements of a view of it.

    Args:
        offset: the tensor's first element in its storage.
        view: the view; it may have any strides.

    Returns:
        The smallest block, if the view is one; otherwise whole rows of the first dimension.
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
    """Return the index of an element of a contiguous tensor."""
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def _follows(view: torch.Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a view steps through a block of a contiguous tensor and nothing else."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return _merged(zip(strides, sizes, strict=True)) == _merged(zip(view.stride(), view.shape, strict=True))


def _merged(steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return dimensions (stride, size) in order of their strides, with those joined that can be walked as one."""
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
    """Records which parts of watched tensors are read while the mode is active.

    A view reads nothing; every other operation on a view reads all of its elements. Code that gets at the memory
    without PyTorch's operations is not noticed, so whoever relies on the result must check it once (`endpoints`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: BlocksByName = {}
        """The parts by name; a name without reads is missing."""
        self._watched: dict[int, tuple[StorageWeakRef, str, tuple[int, ...], int]] = {}

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record reads of contiguous tensors, each alone in its storage, for as long as they exist."""
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            of_tensor = (StorageWeakRef(storage), name, tuple(tensor.shape), int(tensor.storage_offset()))
            self._watched[storage.data_ptr()] = of_tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the tensors that an operation reads, and do it."""
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
    """A weight of which a rank holds blocks."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Torch dtype in which it is sent, without its prefix, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    order: tuple[int, ...]
    """Place in the stream; the same on all ranks that hold some of the weight."""
    blocks: tuple[TensorBlock, ...]
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


class SharedReads[K: Hashable]:
    """Reads each of several tensors once for all blocks of them, and keeps them until the last block is read.

    Args:
        read: reads a tensor.
        uses: number of blocks of all tensors.
    """

    def __init__(self, read: Callable[[K], torch.Tensor], uses: int) -> None:
        self._read, self._uses, self._left = read, uses, uses
        self._kept: dict[K, torch.Tensor] = {}

    def of(self, key: K) -> torch.Tensor:
        """Return a tensor for one block of it."""
        if key not in self._kept:
            self._kept[key] = self._read(key)
        found = self._kept[key]
        self._left -= 1
        if self._left == 0:
            self._kept, self._left = {}, self._uses
        return found


class ReadableWeights:
    """Weights that are read one by one (see `HeldWeights`).

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
    """Tensors that this rank holds whole (see `HeldWeights`).

    Args:
        iterate: yields name and tensor; called once for each stream, and before the first one to describe them.
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
    return Held(name, dtype_name(tensor.dtype), shape, (number,), (whole_block(shape),))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its prefix, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
