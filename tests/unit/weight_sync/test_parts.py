"""Parts of tensors, and the record of what loaders read."""

from collections.abc import Callable

import pytest
import torch

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.weight_sync.parts import ReadRecorder, add_block, block_of_view

SHAPE = (4, 6, 5)


def full() -> torch.Tensor:
    return torch.arange(120.0).view(SHAPE).clone()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t, whole_block(SHAPE)),
        (lambda t: t.narrow(0, 1, 2), TensorBlock((1, 0, 0), (2, 6, 5))),
        (lambda t: t.narrow(1, 2, 3), TensorBlock((0, 2, 0), (4, 3, 5))),
        (lambda t: t.narrow(2, 4, 1), TensorBlock((0, 0, 4), (4, 6, 1))),
        (lambda t: t[2, 1:3, 2:4], TensorBlock((2, 1, 2), (1, 2, 2))),
        (lambda t: t[3].t(), TensorBlock((3, 0, 0), (1, 6, 5))),
        (lambda t: t[1].reshape(-1), TensorBlock((1, 0, 0), (1, 6, 5))),
        (lambda t: t.chunk(2, dim=1)[1].permute(2, 0, 1), TensorBlock((0, 3, 0), (4, 3, 5))),
    ],
)
def test_the_part_of_a_block_is_exact(view: Callable[[torch.Tensor], torch.Tensor], expected: TensorBlock) -> None:
    tensor = full()
    assert block_of_view(SHAPE, 0, view(tensor)) == expected
    assert torch.equal(expected.of(tensor).sort().values.flatten().sort().values, view(tensor).flatten().sort().values)


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (lambda t: t.view(24, 5)[5:8], (0, 2)),
        (lambda t: t[:, ::2], (0, 4)),
        (lambda t: t.view(-1)[33:37], (1, 1)),
        (lambda t: t[2:3].expand(3, 6, 5), (2, 1)),
        (lambda t: torch.diagonal(t, dim1=1, dim2=2), (0, 4)),
    ],
)
def test_what_is_no_block_takes_whole_rows(view: Callable[[torch.Tensor], torch.Tensor], rows: tuple[int, int]) -> None:
    part = block_of_view(SHAPE, 0, view(full()))
    assert part == TensorBlock((rows[0], 0, 0), (rows[1], 6, 5))
    assert set(view(full()).flatten().tolist()) <= set(part.of(full()).flatten().tolist())


def test_parts_join_into_blocks_and_stay_apart_otherwise() -> None:
    left, right, far = TensorBlock((0, 0), (2, 3)), TensorBlock((2, 0), (1, 3)), TensorBlock((8, 0), (1, 3))
    assert add_block((left,), right) == (TensorBlock((0, 0), (3, 3)),)
    assert add_block((left,), far) == (left, far)
    assert add_block((left,), TensorBlock((1, 1), (1, 1))) == (left,), "it is contained"
    assert add_block((left,), TensorBlock((1, 2), (2, 2))) == (TensorBlock((0, 0), (3, 4)),), "they overlap"
    assert add_block((left, far), TensorBlock((2, 0), (6, 3))) == (TensorBlock((0, 0), (9, 3)),), "it closes the gap"
    many: tuple[TensorBlock, ...] = ()
    for row in range(0, 200, 2):
        many = add_block(many, TensorBlock((row, 0), (1, 3)))
    assert len(many) <= 16
    assert all(any(part.starts[0] <= row < part.starts[0] + part.shape[0] for part in many) for row in range(0, 200, 2))


def test_reads_are_recorded_and_views_are_not() -> None:
    tensors = {"rows": full(), "columns": full(), "untouched": full(), "scalar": torch.tensor(2.0), "converted": full()}
    recorder = ReadRecorder()
    recorder.watch(tensors.items())
    with recorder:
        torch.empty(2, 6, 5).copy_(tensors["rows"].narrow(0, 2, 2))
        tensors["columns"][:, 1:3].contiguous()
        tensors["untouched"].view(-1)[3:5]
        tensors["scalar"].item()
        tensors["converted"][0].to(torch.bfloat16)
    tensors["untouched"].sum()
    assert recorder.reads == {
        "rows": (TensorBlock((2, 0, 0), (2, 6, 5)),),
        "columns": (TensorBlock((0, 1, 0), (4, 2, 5)),),
        "scalar": (TensorBlock((), ()),),
        "converted": (TensorBlock((0, 0, 0), (1, 6, 5)),),
    }


def test_memory_that_was_freed_belongs_to_no_name() -> None:
    recorder = ReadRecorder()
    first = torch.ones(1000)
    recorder.watch([("first", first)])
    del first
    with recorder:
        for _ in range(20):
            torch.ones(1000).sum()
    assert recorder.reads == {}
