"""Prove that the weights that arrived are the weights that were sent.

The sender stamps each tensor with a fingerprint before it leaves; the receiver computes it again on what it got and
answers with a receipt. Invariant: a mismatch raises `WeightSyncError` with tensor names.
"""

from dataclasses import dataclass, field

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot

_WORD_BYTES = 4
_CHUNK_WORDS = 1 << 18
_CHUNK_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


@dataclass
class SyncReceipt:
    """A generator's answer to one weight sync.

    Attributes:
        receiver: name of the engine's worker that answers.
        version: weight version it now generates with.
        num_tensors: tensors it received.
        num_bytes: payload bytes it received.
        mismatched: names of tensors whose fingerprint differs from the sender's.
        unbound: names of engine parameters that no received tensor was loaded into.
    """

    receiver: str
    version: int
    num_tensors: int = 0
    num_bytes: int = 0
    mismatched: list[str] = field(default_factory=list)
    unbound: list[str] = field(default_factory=list)


def fingerprint(flat: torch.Tensor, slot: TensorSlot) -> int:
    """A 64-bit checksum of one tensor's bytes that depends on their order.

    Computes `sum_i word_i * (2 i + 1)` modulo 2^64 over signed 4-byte words in chunks of 2^18 words, then
    chains the chunk sums. Within a chunk every change of a single word and every exchange of two words
    changes the sum: the difference is never a multiple of 2^64, because words are narrower than the sum.
    Runs on the tensor's own device and gives the same number on every device.

    Args:
        flat: uint8 bucket buffer.
        slot: the tensor's place; bytes between tensors are not covered.
    """
    raw = flat[slot.offset : slot.offset + slot.num_bytes]
    num_tail_bytes = slot.num_bytes % _WORD_BYTES
    words = raw[: slot.num_bytes - num_tail_bytes].view(torch.int32)
    length = min(_CHUNK_WORDS, len(words))
    weights = torch.arange(1, 2 * length + 1, 2, dtype=torch.int64, device=flat.device)
    products = torch.empty_like(weights)
    chunk_sums = [
        torch.mul(chunk, weights[: len(chunk)], out=products[: len(chunk)]).sum()
        for chunk in words.split(_CHUNK_WORDS)
        if len(chunk)
    ]
    result = slot.num_bytes
    for value in torch.stack(chunk_sums).tolist() if chunk_sums else []:
        result = (result * _CHUNK_MULTIPLIER + value) & _MASK_64
    for byte in raw[slot.num_bytes - num_tail_bytes :].tolist():
        result = (result * _CHUNK_MULTIPLIER + byte + 1) & _MASK_64
    return result


def mismatched_names(flat: torch.Tensor, slots: list[TensorSlot]) -> list[str]:
    """Names of the tensors in a received buffer whose fingerprint is not the sender's."""
    return [slot.name for slot in slots if slot.fingerprint is not None and fingerprint(flat, slot) != slot.fingerprint]


def check_receipts(receipts: list[SyncReceipt], buckets: list[Bucket], version: int) -> None:
    """Compare every engine's receipt with what was sent.

    Raises:
        WeightSyncError: no engine answered, or one reports another version, another number of tensors or
            bytes, tensors whose content differs, or parameters that received nothing.
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
    if problems:
        raise WeightSyncError(
            f"Weight sync to version {version} failed; generation would run with wrong weights. " + "; ".join(problems)
        )


def _shorten(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
