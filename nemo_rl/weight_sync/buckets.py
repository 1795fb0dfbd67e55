"""Place named tensors one after another in flat byte buffers, and read them back.

A weight stream is divided into buckets so that a sync never needs a second copy of the model. Transports move the flat
buffer; only this file knows the tensors' positions in it. Invariant: `unpack(pack(x))` is `x`, bit for bit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class TensorSlot:
    """Position of one tensor in a bucket.

    Attributes:
        name: Hugging Face parameter name.
        dtype: torch dtype without its prefix, for example "bfloat16".
        shape: full (unsharded) shape.
        offset: first byte in the bucket, a multiple of `ALIGNMENT_BYTES`.
        num_bytes: bytes the tensor takes.
        fingerprint: content checksum from the sender; None if verification is off.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    fingerprint: int | None = None


@dataclass
class Bucket:
    """Description of one bucket, sent to the generators.

    Attributes:
        index: position in the stream, from 0.
        slots: the tensors in the bucket.
        num_bytes: size of the flat buffer.
        is_last: whether the stream ends with this bucket.
        handles: access to the bytes: `{node id or device uuid: the transport's handle}`; empty for
            collectives, which send the bytes.
    """

    index: int
    slots: list[TensorSlot]
    num_bytes: int
    is_last: bool = False
    handles: dict[str, Any] = field(default_factory=dict)


def aligned(num_bytes: int) -> int:
    """Round a byte count up to `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def group_by_size(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_size_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Divide a stream of tensors into groups of at most `bucket_size_bytes`.

    A tensor larger than a bucket gets its own group. Order is kept.
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


def plan_slots(group: list[tuple[str, torch.Tensor]]) -> tuple[list[TensorSlot], int]:
    """Assign each tensor of a group its position; return the slots and the buffer size in bytes."""
    slots: list[TensorSlot] = []
    offset = 0
    for name, tensor in group:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, dtype, tuple(tensor.shape), offset, num_bytes))
        offset += aligned(num_bytes)
    return slots, offset


def pack(group: list[tuple[str, torch.Tensor]], slots: list[TensorSlot], flat: torch.Tensor) -> None:
    """Copy each tensor of `group` to its slot in `flat` (uint8, at least the planned size)."""
    for (_, tensor), slot in zip(group, slots, strict=True):
        view_of(flat, slot).copy_(tensor.detach())


def view_of(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor of `slot` as a view into the flat uint8 buffer."""
    raw = flat[slot.offset : slot.offset + slot.num_bytes]
    return raw.view(getattr(torch, slot.dtype)).view(slot.shape)


def unpack(flat: torch.Tensor, slots: list[TensorSlot]) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a bucket as `(name, view into flat)`, in the order they were packed."""
    return [(slot.name, view_of(flat, slot)) for slot in slots]
