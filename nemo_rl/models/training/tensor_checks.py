"""Check tensors: find values that are not finite, and describe a tensor by numbers that others can compare.

Find weights and gradients that hold NaN or infinity.

Invariant: a check costs one pass over the memory, no copy of it, and one transfer from each device, whatever the number
of tensors.

Describe a tensor by a few numbers, so that two machines can compare tensors that neither of them stores. A fingerprint
is a sum over the elements, each with its index in the whole tensor. So fingerprints of disjoint pieces of a tensor add
up to that of the whole, whatever ranks hold the pieces. Invariant: the checksum of equal bits is equal on every device
and for every division; the other numbers are close where the elements are close.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.utils.errors import NonFiniteError

ANOTHER_COPY = "Take another copy of the model."
_MOST_NAMES = 8


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity.

    Args:
        tensors: tensors of any shape and dtype, on any device; of a DTensor this rank's part is checked. Tensors that
            are empty, on the meta device, of integers or in an 8-bit format are skipped.
    """
    looked_at = {name: held_here(tensor) for name, tensor in tensors.items()}
    looked_at = {name: tensor for name, tensor in looked_at.items() if _may_not_be_finite(tensor)}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in looked_at.items():
        by_device.setdefault(tensor.device, []).append(name)
    found = []
    for names in by_device.values():
        # The extremes are NaN if any value is; `isfinite` would need memory for its result.
        extremes = torch.stack([torch.stack(torch.aminmax(looked_at[name])).float() for name in names])
        finite = extremes.isfinite().all(dim=1).tolist()
        found += [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    return found


def _may_not_be_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0 and not tensor.is_meta


def on_all_ranks(names: list[str]) -> list[str]:
    """Return the names found on any rank, in the order of ranks, in a collective call."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return names
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, names)
    return list(dict.fromkeys(name for of_rank in found for name in of_rank))


def require_finite(tensors: Mapping[str, Tensor], whose: str, advice: str) -> None:
    """Refuse weights that are not finite.

    Raises:
        NonFiniteError: some are not; the message names them.
    """
    names = not_finite(tensors)
    if names:
        raise NonFiniteError(f"The weights of {whose} are not finite: {listed(names)}. {advice}")


def listed(names: Iterable[str]) -> str:
    """Join the first few names, and say how many more there are."""
    given = list(names)
    more = len(given) - _MOST_NAMES
    return ", ".join(given[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


_CHUNK = 1 << 20
"""Elements at a time; bounds the temporary memory to a few of their int64 copies."""
_NUM_SKETCHES = 4
_MASK = (1 << 64) - 1
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd constants of the mixing function splitmix64, as signed numbers."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """The numbers of a tensor, or of pieces of one."""

    checksum: int = 0
    """Sum modulo 2^64 of the elements' bits, each times an odd number that follows from its index."""
    square_sum: float = 0.0
    sketch: tuple[float, ...] = (0.0,) * _NUM_SKETCHES
    """Sums of the elements with signs that follow from their indices. The mean square of the difference of two sketches
    is an estimate of the squared distance of the tensors."""

    def __add__(self, other: Self) -> "Fingerprint":
        sketch = tuple(mine + its for mine, its in zip(self.sketch, other.sketch, strict=True))
        return Fingerprint((self.checksum + other.checksum) & _MASK, self.square_sum + other.square_sum, sketch)

    @property
    def norm(self) -> float:
        """The 2-norm of the tensor."""
        return math.sqrt(self.square_sum)

    def distance(self, other: "Fingerprint") -> float:
        """Estimate the distance of two tensors, usually right within a factor of 2, or 0 if the bits are equal.

        It is infinite if one of the tensors is not finite.
        """
        if self.checksum == other.checksum:
            return 0.0
        squares = [(mine - its) ** 2 for mine, its in zip(self.sketch, other.sketch, strict=True)]
        apart = math.sqrt(sum(squares) / len(squares))
        return apart if math.isfinite(apart) else math.inf

    def as_json(self) -> list[Any]:
        """Return plain values for a file of JSON."""
        return [f"{self.checksum:016x}", self.square_sum, *self.sketch]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """Rebuild what `as_json` returned."""
        return cls(int(values[0], 16), float(values[1]), tuple(map(float, values[2:])))


@dataclass(frozen=True)
class Piece:
    """The fingerprint of the part of a tensor that a rank holds."""

    offset: tuple[int, ...]
    """Index of its first element, in each dimension of the whole tensor."""
    fingerprint: Fingerprint


@torch.no_grad()
def fingerprint(tensor: Tensor, shape: Sequence[int] | None = None, offset: Sequence[int] = ()) -> Fingerprint:
    """Compute the fingerprint of a tensor, or of a piece of one.

    Args:
        tensor: the elements.
        shape: shape of the whole tensor; None: the tensor is whole.
        offset: index of the first element of the piece, in each dimension.
    """
    shape = tuple(tensor.shape) if shape is None else tuple(shape)
    offset = tuple(offset) or (0,) * len(shape)
    flat = tensor.detach().contiguous().reshape(-1)
    index = _Index(tuple(tensor.shape), shape, offset)
    parts = [
        _of_chunk(flat[start : start + _CHUNK], index.of(start, min(start + _CHUNK, flat.numel()), flat.device))
        for start in range(0, flat.numel(), _CHUNK)
    ]
    return added(parts)


def pieces(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Compute the fingerprints of this rank's pieces of tensors, except tensors of which it has no elements."""
    return {name: _piece(tensor) for name, tensor in tensors.items() if _has_elements(tensor)}


def joined(of_ranks: Iterable[Mapping[str, Piece]]) -> dict[str, Fingerprint]:
    """Add up the pieces of whole tensors, by name, and count a piece that several ranks hold once."""
    found: dict[str, dict[tuple[int, ...], Fingerprint]] = {}
    for of_rank in of_ranks:
        for name, piece in of_rank.items():
            found.setdefault(name, {}).setdefault(piece.offset, piece.fingerprint)
    return {name: added(of_tensor.values()) for name, of_tensor in found.items()}


def added(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Add fingerprints of disjoint pieces."""
    return sum(parts, Fingerprint())


def _has_elements(tensor: Tensor) -> bool:
    """Return whether this rank holds elements of a tensor, counting only the local part of a DTensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(local.numel())


def _piece(tensor: Tensor) -> Piece:
    # Imported here, because the controller joins fingerprints and has no DTensor.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        offset: tuple[int, ...] = (0,) * tensor.dim()
        return Piece(offset, fingerprint(tensor))
    _, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    offset = tuple(int(start) for start in starts)
    return Piece(offset, fingerprint(tensor.to_local(), tensor.shape, offset))


@dataclass(frozen=True)
class _Index:
    """The indices of the elements of a piece in the flattened whole tensor."""

    local: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the indices of the elements `start` to `stop` of the flattened piece, int64."""
        flat = torch.arange(start, stop, device=device)
        first, stride = self._strides()
        if self.local[1:] == self.shape[1:]:  # whole rows follow each other in both
            return flat + first
        index, rest = torch.full_like(flat, first), flat
        for size, step in zip(reversed(self.local), reversed(stride), strict=True):
            index += rest % size * step
            rest = rest // size
        return index

    def _strides(self) -> tuple[int, list[int]]:
        stride = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return sum(start * step for start, step in zip(self.offset, stride, strict=True)), stride


def _of_chunk(values: Tensor, index: Tensor) -> Fingerprint:
    bits = values.view(_INTEGERS[values.element_size()]).long() if values.dtype != torch.bool else values.long()
    mixed = (index + 1) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 29)) * _FACTORS[1]
    mixed ^= mixed >> 32
    checksum = int((bits * (mixed | 1)).sum()) & _MASK
    numbers = values.double()
    total = numbers.sum()
    # A sum with signs is the sum of all minus twice that of the elements with a minus.
    sketch = torch.stack([total - 2 * (numbers * (mixed >> bit & 1)).sum() for bit in range(8, 8 + _NUM_SKETCHES)])
    return Fingerprint(checksum, float(numbers.square().sum()), tuple(sketch.tolist()))
