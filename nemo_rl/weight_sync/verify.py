"""Verify that the received weights equal the sent weights.

The sender adds a fingerprint to each tensor. The receiver computes the fingerprint again from the received bytes, and
answers with a receipt. Invariant: a mismatch raises a `WeightSyncError` that names the tensors.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot

_WORD_BYTES = 4
_CHUNK_WORDS = 1 << 18
# # Number of chunks per kernel: one on a CPU, whose cache holds one chunk, and many on a GPU, which needs few launches
# (the products take 128 MiB).
_CHUNKS_AT_A_TIME = {"cpu": 1, "cuda": 64}
_CHUNK_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


@dataclass
class SyncReceipt:
    """Answer of a worker of an engine to a weight sync."""

    receiver: str
    """Name of the worker."""
    version: int
    """Version of the received weights."""
    num_tensors: int = 0
    """Number of received tensors."""
    num_bytes: int = 0
    """Number of received bytes."""
    mismatched: list[str] = field(default_factory=list)
    """Names of tensors whose fingerprint differs from the sender's."""
    unbound: list[str] = field(default_factory=list)
    """Names of engine parameters that got no received tensor."""
    altered: list[str] = field(default_factory=list)
    """Names of engine parameters that hold other values than were received for them."""


def fingerprints(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> list[int]:
    """Compute a 64-bit checksum of each tensor's bytes that depends on their order.

    The checksum is `sum_i word_i * (2 i + 1)` modulo 2^64 over signed 4-byte words in chunks of 2^18 words, and the
    sums of the chunks are chained. Within a chunk, a change of a single word or an exchange of two different words
    always changes the sum, because the difference is too small to be a multiple of 2^64. The function runs on the
    buffer's device, gives the same numbers on every device, and waits for the device once.

    Args:
        flat: uint8 bucket buffer.
        slots: positions of the tensors; bytes between tensors are not included.
    """
    most_words = max((slot.num_bytes // _WORD_BYTES for slot in slots), default=0)
    length = min(_CHUNK_WORDS, most_words)
    weights = torch.arange(1, 2 * length + 1, 2, dtype=torch.int64, device=flat.device)
    at_a_time = min(_CHUNKS_AT_A_TIME[flat.device.type], -(-most_words // _CHUNK_WORDS))
    products = weights.new_empty(at_a_time, length)
    raws = (flat[slot.offset : slot.offset + slot.num_bytes] for slot in slots)
    parts = [part for raw in raws for part in _sums(raw, weights, products)]
    values = iter(torch.cat(parts).tolist() if parts else [])
    return [_chained(slot.num_bytes, values) for slot in slots]


def fingerprint(flat: torch.Tensor, slot: TensorSlot) -> int:
    """Return the fingerprint of one tensor (`fingerprints`)."""
    return fingerprints(flat, [slot])[0]


def _sums(raw: torch.Tensor, weights: torch.Tensor, products: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the weighted sums of a tensor's chunks, then the bytes after its last whole word, as 1-D int64 tensors."""
    num_words = len(raw) // _WORD_BYTES
    words = raw[: num_words * _WORD_BYTES].view(torch.int32)
    num_whole = num_words // _CHUNK_WORDS * _CHUNK_WORDS
    for block in words[:num_whole].view(-1, _CHUNK_WORDS).split(len(products)) if num_whole else ():
        yield torch.mul(block, weights, out=products[: len(block)]).sum(dim=1)
    rest = num_words - num_whole
    if rest:
        yield torch.mul(words[num_whole:], weights[:rest], out=products[0, :rest]).sum(dim=0, keepdim=True)
    if len(raw) % _WORD_BYTES:
        yield raw[num_words * _WORD_BYTES :].long()


def _chained(num_bytes: int, values: Iterator[int]) -> int:
    """Return the fingerprint of a tensor of `num_bytes` bytes. The next items of `values` are its `_sums`."""
    num_words, num_tail_bytes = divmod(num_bytes, _WORD_BYTES)
    result = num_bytes
    for value in itertools.islice(values, -(-num_words // _CHUNK_WORDS)):
        result = (result * _CHUNK_MULTIPLIER + value) & _MASK_64
    for byte in itertools.islice(values, num_tail_bytes):
        result = (result * _CHUNK_MULTIPLIER + byte + 1) & _MASK_64
    return result


def mismatched_names(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> list[str]:
    """Return the names of the received tensors whose fingerprint differs from the sender's."""
    stamped = [slot for slot in slots if slot.fingerprint is not None]
    found = zip(stamped, fingerprints(flat, stamped), strict=True)
    return [slot.name for slot, value in found if value != slot.fingerprint]


def check_receipts(receipts: list[SyncReceipt], buckets: list[Bucket], version: int) -> None:
    """Compare every engine's receipt with the sent buckets.

    Raises:
        WeightSyncError: no engine answered, or a receipt has another version, another number of tensors or bytes,
            tensors whose content differs, or parameters that received nothing or hold other values.
    """
    num_tensors = sum(len(bucket.slots) for bucket in buckets)
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    problems = [] if receipts else ["no engine answered"]
    for receipt in receipts:
        if receipt.version != version:
            problems.append(f"{receipt.receiver}: version {receipt.version}, sent {version}")
        if receipt.num_tensors != num_tensors:
            problems.append(f"{receipt.receiver}: got {receipt.num_tensors} tensors, {num_tensors} were sent")
        if receipt.num_bytes != num_bytes:
            problems.append(f"{receipt.receiver}: got {receipt.num_bytes} bytes, {num_bytes} were sent")
        if receipt.mismatched:
            problems.append(f"{receipt.receiver}: content differs in {_shorten(receipt.mismatched)}")
        if receipt.unbound:
            problems.append(f"{receipt.receiver}: nothing was loaded into {_shorten(receipt.unbound)}")
        if receipt.altered:
            problems.append(f"{receipt.receiver}: the engine holds other values in {_shorten(receipt.altered)}")
    if problems:
        raise WeightSyncError(
            f"Weight sync to version {version} failed; generation would run with wrong weights. " + "; ".join(problems)
        )


def _shorten(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
