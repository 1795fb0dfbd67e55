"""Fingerprints change with every small change, and receipts that do not match stop the run."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync import verify
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot, cut, pack, plan_slots
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts, fingerprint, fingerprints, mismatched_names

pytestmark = pytest.mark.fast


def whole(flat: torch.Tensor) -> TensorSlot:
    return TensorSlot("w", "uint8", (flat.numel(),), 0, flat.numel())


def print_of(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return fingerprint(flat, whole(flat))


def reference_fingerprint(data: bytes, chunk_words: int) -> int:
    """Compute the docstring's formula in plain integers."""
    num_words = len(data) // 4
    words = [int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True) for i in range(num_words)]
    result = len(data)
    for start in range(0, num_words, chunk_words):
        total = sum(word * (2 * i + 1) for i, word in enumerate(words[start : start + chunk_words]))
        result = (result * 0x9E3779B97F4A7C15 + total) % 2**64
    for byte in data[4 * num_words :]:
        result = (result * 0x9E3779B97F4A7C15 + byte + 1) % 2**64
    return result


@settings(deadline=None, max_examples=80)
@given(st.binary(min_size=0, max_size=200))
def test_fingerprints_equal_plain_integer_arithmetic(data):
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    small = 8
    original, verify._CHUNK_WORDS = verify._CHUNK_WORDS, small
    try:
        assert fingerprint(flat, whole(flat)) == reference_fingerprint(data, small)
    finally:
        verify._CHUNK_WORDS = original


@settings(deadline=None, max_examples=80)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_single_bit_flip_changes_the_fingerprint(data, draw):
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = fingerprint(flat, whole(flat))
    position = draw.draw(st.integers(0, len(data) - 1))
    flat[position] ^= 1 << draw.draw(st.integers(0, 7))
    assert fingerprint(flat, whole(flat)) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("values", [(1.0, -1.0), (2.0, 3.0), (0.0, 1.0), (0.0, -0.0)])
def test_swapping_two_elements_changes_the_fingerprint(dtype, values):
    """Also if they differ in the highest bit only, which a weighted sum of whole words would lose."""
    if dtype == torch.int64:
        values = (-(2**63), 0)
    for first, second in [(0, 1), (0, 2), (3, 4), (2, 66), (0, 64), (1, 257)]:
        tensor = torch.zeros(300, dtype=dtype)
        tensor[first], tensor[second] = values
        exchanged = tensor.clone()
        exchanged[first], exchanged[second] = tensor[second].item(), tensor[first].item()
        if exchanged.view(torch.uint8).equal(tensor.view(torch.uint8)):
            continue
        assert print_of(exchanged) != print_of(tensor)


class CountOps(TorchDispatchMode):
    num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def test_a_gpu_runs_few_kernels_and_one_synchronization_per_bucket(monkeypatch):
    """The code for GPUs, run on a CPU, uses equally many kernels for 2 and 60 chunks, and one transfer in all."""
    monkeypatch.setattr(verify, "_CHUNK_WORDS", 16)
    monkeypatch.setitem(verify._CHUNKS_AT_A_TIME, "cpu", verify._CHUNKS_AT_A_TIME["cuda"])
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(len(self)) or tolist(self))
    counts = []
    for num_chunks in (2, 60):
        group = [(str(n), torch.randn(16 * num_chunks + n)) for n in range(3)] + [("b", torch.ones(7).bfloat16())]
        slots, num_bytes = plan_slots(cut(group, None))
        flat = torch.zeros(num_bytes, dtype=torch.uint8)
        pack(cut(group, None), slots, flat)
        transfers.clear()
        with CountOps() as ops:
            found = fingerprints(flat, slots)
        counts.append(ops.num_ops)
        assert len(transfers) == 1
        raws = [flat[slot.offset : slot.offset + slot.num_bytes].numpy().tobytes() for slot in slots]
        assert found == [reference_fingerprint(raw, 16) for raw in raws]
    assert counts[1] <= counts[0], "ops per tensor do not grow with its chunks"


def test_swapping_chunks_or_rows_changes_the_fingerprint():
    tensor = torch.randn(3, verify._CHUNK_WORDS)
    assert len({print_of(tensor), print_of(tensor[[1, 0, 2]]), print_of(tensor[[0, 2, 1]])}) == 3
    matrix = torch.randn(64, 64)
    assert print_of(matrix) != print_of(matrix.t())


def test_zeros_of_different_lengths_have_different_fingerprints():
    prints = {print_of(torch.zeros(length, dtype=torch.uint8)) for length in range(1, 40)}
    assert len(prints) == 39


def test_bytes_outside_the_tensor_do_not_change_the_fingerprint():
    flat = torch.arange(64, dtype=torch.uint8)
    slot = TensorSlot("w", "uint8", (21,), 16, 21)
    before = fingerprint(flat, slot)
    flat[:16] += 1
    flat[37:] += 1
    assert fingerprint(flat, slot) == before
    flat[36] += 1
    assert fingerprint(flat, slot) != before


def bucket_of(group: list[tuple[str, torch.Tensor]]) -> tuple[Bucket, torch.Tensor]:
    slots, num_bytes = plan_slots(cut(group, None))
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    pack(cut(group, None), slots, flat)
    slots = [dataclasses.replace(slot, fingerprint=fingerprint(flat, slot)) for slot in slots]
    return Bucket(0, slots, num_bytes, is_last=True), flat


def test_mismatches_name_the_tensors():
    bucket, flat = bucket_of([("a", torch.randn(5)), ("b", torch.randn(3, 3).bfloat16()), ("c", torch.tensor(1.0))])
    assert mismatched_names(flat, bucket.slots) == []
    flat[bucket.slots[1].offset + 7] ^= 16
    assert mismatched_names(flat, bucket.slots) == ["b"]


def test_tensors_without_a_fingerprint_are_not_compared():
    bucket, flat = bucket_of([("a", torch.randn(5))])
    slots = [dataclasses.replace(slot, fingerprint=None) for slot in bucket.slots]
    flat += 1
    assert mismatched_names(flat, slots) == []


BUCKET, _ = bucket_of([("a", torch.randn(5)), ("b", torch.randn(3))])
GOOD = SyncReceipt("engine 0", version=3, num_tensors=2, num_bytes=BUCKET.num_bytes)


def test_a_matching_receipt_passes():
    check_receipts([GOOD, dataclasses.replace(GOOD, receiver="engine 1")], [BUCKET], version=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "engine 1: version 2, sent 3"),
        ({"num_tensors": 1}, "engine 1: got 1 tensors, 2 were sent"),
        ({"num_bytes": 7}, f"engine 1: got 7 bytes, {BUCKET.num_bytes} were sent"),
        ({"mismatched": ["layer.0.w"]}, "engine 1: content differs in layer.0.w"),
        ({"unbound": ["head.weight", "x"]}, "engine 1: nothing was loaded into head.weight, x"),
        ({"unbound": [f"p{i}" for i in range(20)]}, "p7 and 12 more"),
        ({"altered": ["layers.0.mixer.A"]}, "engine 1: the engine holds other values in layers.0.mixer.A"),
    ],
)
def test_every_receipt_that_differs_stops_the_run(change, sentence):
    wrong = dataclasses.replace(GOOD, receiver="engine 1", **change)
    with pytest.raises(WeightSyncError, match="version 3 failed") as caught:
        check_receipts([GOOD, wrong], [BUCKET], version=3)
    assert sentence in str(caught.value)
    assert "engine 0" not in str(caught.value)


def test_a_missing_receipt_is_an_error():
    with pytest.raises(WeightSyncError, match="no engine answered"):
        check_receipts([], [BUCKET], version=3)
