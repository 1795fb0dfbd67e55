"""Tensors in flat buffers come back bit for bit, in order, in groups of the requested size."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from nemo_rl.weight_sync.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketEntry,
    aligned,
    cut,
    group_by_size,
    pack,
    plan_slots,
    unpack,
)

pytestmark = pytest.mark.fast

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 500).map(lambda length: (length,)),
)


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    layout = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [(f"layer.{i}", random_tensor(dtype, shape, generator)) for i, (dtype, shape) in enumerate(layout)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Make random bits, so that NaNs, infinities and negative zeros occur too."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(deadline=None, max_examples=60)
@given(named_tensors())
def test_packing_and_unpacking_is_exact(group):
    slots, num_bytes = plan_slots(cut(group, None))
    flat = torch.full((num_bytes,), 0xAB, dtype=torch.uint8)
    pack(cut(group, None), slots, flat)
    for (name, sent), (got_name, got) in zip(group, unpack(flat, Bucket(0, slots, num_bytes)), strict=True):
        assert (got_name, got.dtype, got.shape) == (name, sent.dtype, sent.shape)
        assert raw_bytes(got) == raw_bytes(sent)


@settings(deadline=None, max_examples=60)
@given(named_tensors())
def test_slots_are_aligned_and_do_not_overlap(group):
    slots, num_bytes = plan_slots(cut(group, None))
    ends = [slot.offset + slot.num_bytes for slot in slots]
    assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in slots)
    assert all(slot.offset >= end for slot, end in zip(slots[1:], ends, strict=False))
    assert num_bytes == aligned(ends[-1])


@settings(deadline=None, max_examples=60)
@given(named_tensors(), st.integers(1, 4000))
def test_groups_keep_the_order_and_the_limit(tensors, limit):
    groups = list(group_by_size(iter(tensors), limit))
    assert [pair for group in groups for pair in group] == tensors
    sizes = [plan_slots(cut(group, None))[1] for group in groups]
    assert all(size <= limit or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    # no two neighbours would have fitted into one bucket from the left
    for group, following, size in zip(groups, groups[1:], sizes, strict=False):
        assert size + aligned(following[0][1].nbytes) > limit, group


def test_groups_are_built_lazily():
    """A stream of gathered tensors must not be held in memory as a whole."""
    taken = []

    def stream():
        for index in range(100):
            taken.append(index)
            yield str(index), torch.zeros(4)

    next(group_by_size(stream(), bucket_size_bytes=32))
    assert len(taken) == 3


def test_an_empty_stream_makes_no_group():
    assert list(group_by_size([], 100)) == []


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.expand(3, 4, 6)])
def test_views_are_packed_by_value(make):
    tensor = make(torch.randn(4, 6))
    slots, num_bytes = plan_slots([BucketEntry("view", tensor)])
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    pack([BucketEntry("view", tensor)], slots, flat)
    assert torch.equal(unpack(flat, Bucket(0, slots, num_bytes))[0][1], tensor)
