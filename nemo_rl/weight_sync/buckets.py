"""Pack named tensors one after another into flat byte buffers, and unpack them.

A weight stream is divided into buckets so that a sync never needs a second copy of the model. Transports move the flat
buffer, and only this module knows the positions of the tensors in it. Invariant: `unpack` returns the tensors that were
packed, bit for bit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.weight_sync.parts import BlocksByName

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class TensorSlot:
    """Position of one tensor in a bucket."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Torch dtype without its prefix, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the values in the bucket, which are the full (unsharded) tensor or a part of it."""
    offset: int
    """First byte in the bucket, a multiple of `ALIGNMENT_BYTES`."""
    num_bytes: int
    """Number of bytes of the values."""
    fingerprint: int | None = None
    """Checksum of the content, computed by the sender. None if verification is off."""
    part: TensorBlock | None = None
    """The part of the tensor in the bucket. None for the whole tensor."""
    full_shape: tuple[int, ...] = ()
    """Shape of the whole tensor to which the part belongs."""


@dataclass
class Bucket:
    """Description of one bucket, which is sent to the engines."""

    index: int
    """Position of the bucket in the stream, from 0."""
    slots: list[TensorSlot]
    """The tensors in the bucket."""
    num_bytes: int
    """Size of the flat buffer in bytes."""
    is_last: bool = False
    """Whether the stream ends with this bucket."""
    lane: int = 0
    """Number of the lane whose workers receive the bucket (`lanes`)."""
    is_trial: bool = False
    """Whether `unpack` fills the elements of a tensor that are not in the bucket with NaN."""
    handles: dict[str, Any] = field(default_factory=dict)
    """Handles by which receivers open the buffer, by host name or device uuid. Empty for collectives, which send the
    bytes."""


def aligned(num_bytes: int) -> int:
    """Round a byte count up to `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def group_by_size(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_size_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Divide a stream of tensors into groups of at most `bucket_size_bytes`.

    A tensor larger than a bucket is a group by itself. The order of tensors is kept.
    """
    group: list[tuple[str, torch.Tensor]] = []
    group_bytes = 0
    for name, tensor in named_tensors:
        tensor_bytes = aligned(tensor.numel() * tensor.element_size())
        if group and group_bytes + tensor_bytes > bucket_size_bytes:
            yield group
            group, group_bytes = [], 0
        group.append((name, tensor))
        group_bytes += tensor_bytes
    if group:
        yield group


class BucketEntry(NamedTuple):
    """A tensor to pack or a part of one: name and values, and for a part its location and the tensor's shape."""

    name: str
    values: torch.Tensor
    part: TensorBlock | None = None
    full_shape: tuple[int, ...] = ()


def cut(group: Iterable[tuple[str, torch.Tensor]], parts: BlocksByName | None) -> list[BucketEntry]:
    """Return the parts of a group's tensors for a lane. Integer tensors and completely read tensors are not cut."""
    entries: list[BucketEntry] = []
    for name, tensor in group:
        shape = tuple(tensor.shape)
        wanted = (whole_block(shape),) if parts is None else parts.get(name, ())
        if wanted == (whole_block(shape),) or (wanted and not tensor.is_floating_point()):
            entries.append(BucketEntry(name, tensor))
        else:
            entries += [BucketEntry(name, part.of(tensor), part, shape) for part in wanted]
    return entries


def plan_slots(pieces: Iterable[BucketEntry]) -> tuple[list[TensorSlot], int]:
    """Return a slot for each tensor or part, and the size of the buffer in bytes."""
    slots: list[TensorSlot] = []
    offset = 0
    for name, values, part, full_shape in pieces:
        num_bytes = values.numel() * values.element_size()
        dtype = str(values.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, dtype, tuple(values.shape), offset, num_bytes, None, part, full_shape))
        offset += aligned(num_bytes)
    return slots, offset


def pack(pieces: Iterable[BucketEntry], slots: list[TensorSlot], flat: torch.Tensor) -> None:
    """Copy each tensor or part to its slot in `flat`, a uint8 tensor of at least the planned size."""
    for piece, slot in zip(pieces, slots, strict=True):
        view_of(flat, slot).copy_(piece.values.detach())


def view_of(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor of `slot` as a view into the flat uint8 buffer."""
    raw = flat[slot.offset : slot.offset + slot.num_bytes]
    return raw.view(getattr(torch, slot.dtype)).view(slot.shape)


def unpack(flat: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a bucket by name, in the order of packing.

    Whole tensors of the last bucket are views into `flat`. Whole tensors of earlier buckets are copies, because an
    engine may keep them until a layer is complete, while the sender reuses its buffers. Parts are copied into tensors
    of the full shape. The other elements of these tensors are undefined, or NaN if `bucket.is_trial` is set.
    """
    tensors: dict[str, torch.Tensor] = {}
    for slot in bucket.slots:
        values = view_of(flat, slot)
        if slot.part is None:
            tensors[slot.name] = values if bucket.is_last else values.clone()
            continue
        if slot.name not in tensors:
            tensors[slot.name] = values.new_empty(slot.full_shape)
            if bucket.is_trial:
                tensors[slot.name].fill_(math.nan)
        slot.part.of(tensors[slot.name]).copy_(values)
    return list(tensors.items())
