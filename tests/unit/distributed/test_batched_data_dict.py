"""BatchedDataDict: join, split and order rows, and pickle them."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.distributed.tensor_transport import COPY_BELOW_BYTES
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def numbered(rows: int) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "ids": torch.arange(rows * 3).view(rows, 3),
            "idx": torch.arange(rows),
            "names": [f"row{i}" for i in range(rows)],
        }
    )


def rows_of(batch: BatchedDataDict) -> list[int]:
    """Return row numbers, after checking that all values agree on them."""
    rows = batch["idx"].tolist()
    assert batch["names"] == [f"row{i}" for i in rows]
    assert batch["ids"][:, 0].tolist() == [3 * i for i in rows]
    return rows


def test_from_batches_pads_on_the_right_and_sorts_keys():
    first = {"x": torch.ones(2, 3), "n": torch.tensor([1, 2]), "l": ["a", "b"]}
    second = {"x": torch.full((1, 5), 2.0), "n": torch.tensor([3]), "l": ["c"]}
    joined = BatchedDataDict.from_batches([first, second], {"x": -1.0})
    assert list(joined) == ["l", "n", "x"]
    assert joined["x"].tolist() == [[1, 1, 1, -1, -1], [1, 1, 1, -1, -1], [2, 2, 2, 2, 2]]
    assert joined["n"].tolist() == [1, 2, 3] and joined["l"] == ["a", "b", "c"]
    three_dims = BatchedDataDict.from_batches([{"k": torch.ones(1, 2, 4)}, {"k": torch.ones(2, 3, 4)}])
    assert three_dims["k"].shape == (3, 3, 4) and three_dims["k"][0, 2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "at least one batch"),
        ([{"a": [1]}, {"b": [1]}], r"differs from batch 0 in the keys \['a', 'b'\]"),
        ([{"a": [1]}, {"a": torch.ones(1)}], "cannot join 'a'"),
        ([{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 2).long()}], "dtypes"),
        ([{"a": torch.ones(1, 2, 3)}, {"a": torch.ones(1, 2, 4)}], "shapes"),
    ],
)
def test_from_batches_refuses_batches_that_do_not_match(batches, message):
    with pytest.raises(DataError, match=message):
        BatchedDataDict.from_batches(batches)


def test_shards_split_every_global_batch():
    shards = numbered(8).shard_by_batch_size(2, batch_size=4)
    assert [rows_of(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert all(isinstance(shard, SlicedDataDict) for shard in shards)
    assert [rows_of(s) for s in numbered(4).shard_by_batch_size(2)] == [[0, 1], [2, 3]]


def test_uneven_shards_differ_by_at_most_one_row():
    shards = numbered(5).shard_by_batch_size(3, allow_uneven_shards=True)
    assert [rows_of(shard) for shard in shards] == [[0, 1], [2, 3], [4]]
    with pytest.raises(DataError, match="5 rows do not divide"):
        numbered(5).shard_by_batch_size(3)
    with pytest.raises(DataError, match="cannot be given together"):
        numbered(6).shard_by_batch_size(3, batch_size=3, allow_uneven_shards=True)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(7)))
def test_reorder_undoes_select(order):
    batch = numbered(7).select_indices(order)
    assert rows_of(batch) == list(order)
    batch.reorder_data(order)
    assert rows_of(batch) == list(range(7))


def test_select_repeats_copies_and_checks_bounds():
    batch = numbered(3)
    picked = batch.select_indices(torch.tensor([2, 0, 2]))
    assert rows_of(picked) == [2, 0, 2]
    picked["ids"].zero_()
    assert rows_of(batch) == [0, 1, 2]
    with pytest.raises(DataError, match="within a batch of 3 rows"):
        batch.select_indices([3])


def test_repeat_interleave_makes_independent_list_items():
    batch = BatchedDataDict({"x": torch.tensor([1, 2]), "log": [[{"role": "user"}], []]})
    repeated = batch.repeat_interleave(2)
    assert repeated["x"].tolist() == [1, 1, 2, 2]
    repeated["log"][0].append("answer")
    assert repeated["log"][1] == [{"role": "user"}] and batch["log"][0] == [{"role": "user"}]


def test_a_batch_divides_into_chunks_and_microbatches():
    batch = numbered(6)
    assert rows_of(batch.chunk(1, 3)) == [2, 3]
    assert rows_of(batch.get_batch(1, 4 - 1)) == [3, 4, 5]
    assert rows_of(batch.slice(4, 6)) == [4, 5]
    assert [rows_of(m) for m in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4, 5]]
    for wrong in (
        lambda: batch.chunk(0, 4),
        lambda: batch.get_batch(1, 4),
        lambda: batch.make_microbatch_iterator(4),
    ):
        with pytest.raises(DataError):
            wrong()


def test_a_batch_can_be_truncated_moved_and_turned_into_a_dict():
    batch = numbered(2)
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert batch["ids"].shape == (2, 2) and batch["idx"].shape == (2,)
    assert batch.to("cpu") is batch and batch.size == 2
    assert type(batch.get_dict()) is dict and BatchedDataDict().size == 0


def test_all_columns_must_have_equal_numbers_of_rows():
    with pytest.raises(DataError, match=r"equally many rows, got \{'a': 2, 'b': 1\}"):
        BatchedDataDict({"a": torch.ones(2), "b": ["x"]}).shard_by_batch_size(1)
    with pytest.raises(DataError, match="'a' is int"):
        BatchedDataDict({"a": 3}).slice(0, 1)
    with pytest.raises(DataError, match="0-d tensor"):
        BatchedDataDict({"a": torch.tensor(3)}).slice(0, 1)


def through_shared_memory(value):
    """Pickle as Ray does: buffers out of band, returned read-only."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    read_only = [memoryview(bytes(buffer)) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(stream, buffers=read_only), stream, read_only


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("numel", [0, 5, 2 * COPY_BELOW_BYTES])
def test_every_dtype_is_serialized_bit_for_bit(dtype, numel):
    source = torch.randint(0, 2, (numel,)).to(dtype)
    batch, _, _ = through_shared_memory(BatchedDataDict({"x": source}))
    assert batch["x"].dtype == dtype and batch["x"].shape == source.shape
    assert torch.equal(batch["x"].view(torch.uint8), source.view(torch.uint8))


def test_buffers_are_sent_out_of_band_without_a_copy():
    source = torch.arange(200_000, dtype=torch.float32).view(2, -1).t().bfloat16()
    assert not source.is_contiguous()
    batch, stream, buffers = through_shared_memory(BatchedDataDict({"x": source}))
    assert torch.equal(batch["x"], source)
    assert len(stream) < 1000
    address = np.frombuffer(buffers[0], dtype=np.uint8).__array_interface__["data"][0]
    assert batch["x"].data_ptr() == address


def test_a_serialized_slice_holds_only_its_rows():
    whole = BatchedDataDict({"x": torch.zeros(1000, 1000)})
    _, stream, buffers = through_shared_memory(whole.slice(0, 10))
    assert len(stream) + sum(buffer.nbytes for buffer in buffers) < 50_000


def test_nested_message_logs_are_serialized_and_stay_writable():
    log = [{"role": "user", "token_ids": torch.arange(3), "extra": (torch.ones(2), "x", None)}]
    batch = BatchedDataDict({"log": [log], "grad": torch.ones(1, requires_grad=True)})
    back, stream, _ = through_shared_memory(batch)
    assert b"torch.storage" not in stream and b"_rebuild_tensor" not in stream
    message = back["log"][0][0]
    assert message["token_ids"].tolist() == [0, 1, 2] and message["extra"][1:] == ("x", None)
    message["token_ids"][0] = 7
    assert log[0]["token_ids"][0] == 0 and not back["grad"].requires_grad


def test_the_batch_type_is_kept():
    back, _, _ = through_shared_memory(numbered(2).slice(0, 1))
    assert type(back) is SlicedDataDict
