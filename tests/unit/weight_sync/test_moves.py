"""Plans of moves, checked element by element: whatever the ranks hold and pack, each packs what it should."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from nemo_rl.distributed.ranks.tensor_block import TensorBlock
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import view_of
from nemo_rl.weight_sync.exchange import Move, PackingStep, RankOfTrainer, fill, place_of, plan_steps
from nemo_rl.weight_sync.parts import BlocksByName, Held

pytestmark = pytest.mark.fast
SHAPE = (8, 6)
NAMES = ("first", "second")


def rows(*bounds: int) -> list[TensorBlock]:
    """Divide a tensor along its rows."""
    return [TensorBlock((a, 0), (b - a, 6)) for a, b in zip((0, *bounds), (*bounds, 8), strict=True)]


def columns(*bounds: int) -> list[TensorBlock]:
    return [TensorBlock((0, a), (8, b - a)) for a, b in zip((0, *bounds), (*bounds, 6), strict=True)]


DIVISIONS = (
    rows(),
    rows(4),
    rows(3),
    rows(1, 5),
    columns(3),
    columns(1, 2),
    [rows(4)[0], TensorBlock((4, 0), (4, 3)), TensorBlock((4, 3), (4, 3))],
)


def value(name: str) -> torch.Tensor:
    return torch.arange(48.0).view(SHAPE) + 100 * NAMES.index(name)


def held(name: str, blocks: list[TensorBlock]) -> Held:
    return Held(name, "float32", SHAPE, (NAMES.index(name),), tuple(blocks))


@st.composite
def trainers(draw: st.DrawFn) -> tuple[list[RankOfTrainer], list[BlocksByName | None]]:
    """Draw who holds which blocks, perhaps several times, what lanes read and who packs for them."""
    num_ranks = draw(st.integers(1, 4))
    blocks: list[dict[str, list[TensorBlock]]] = [{name: [] for name in NAMES} for _ in range(num_ranks)]
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    for name in NAMES:
        for block in draw(st.sampled_from(DIVISIONS)):
            for rank in draw(ranks):
                blocks[rank][name].append(block)
    lanes: list[BlocksByName | None] = []
    packs: list[set[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        wanted = {
            name: tuple(draw(st.lists(st.sampled_from(draw(st.sampled_from(DIVISIONS))), max_size=2, unique=True)))
            for name in NAMES
        }
        lanes.append(draw(st.sampled_from([None, wanted])))
        packs.append(draw(ranks))
    described = [
        RankOfTrainer([held(name, own[name]) for name in NAMES if own[name]], [rank in of_lane for of_lane in packs])
        for rank, own in enumerate(blocks)
    ]
    return described, lanes


@settings(deadline=None, max_examples=80)
@given(trainers(), st.integers(1, 500))
def test_every_rank_packs_what_its_lanes_read(drawn, bucket_size):
    ranks, lanes = drawn
    plans = [plan_steps(ranks, me, lanes, bucket_size) for me in range(len(ranks))]
    for steps in zip(*plans, strict=True):
        assert all((step.names, step.layouts) == (steps[0].names, steps[0].layouts) for step in steps)
        for target, rank in enumerate(ranks):
            moves = [move for move in steps[target].moves if move.target == target]
            check_both_sides(steps, target, moves)
            blocks: dict[str, list[tuple[TensorBlock, torch.Tensor]]] = {}
            for move in moves:
                assert_held(ranks[move.source], move)
                blocks.setdefault(move.name, []).append((move.block, move.block.of(value(move.name))))
            for layout, packs in zip(steps[target].layouts, rank.packs, strict=True):
                if packs:
                    flat = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
                    fill(flat, layout, blocks)
                    for slot in layout.slots:
                        assert torch.equal(view_of(flat, slot), place_of(slot).of(value(slot.name)))


def check_both_sides(steps: tuple[PackingStep, ...], target: int, moves: list[Move]) -> None:
    for source, step in enumerate(steps):
        sent = [move for move in step.moves if move.target == target and move.source == source]
        assert sent == [move for move in moves if move.source == source], "both sides agree on the message"


def assert_held(rank: RankOfTrainer, move: Move) -> None:
    blocks = next(each.blocks for each in rank.weights if each.name == move.name)
    assert any(block.common(move.block) == move.block for block in blocks)


def test_nothing_travels_that_the_packing_rank_holds_and_nothing_twice() -> None:
    both = [RankOfTrainer([held("first", [block])], [number == 0]) for number, block in enumerate(rows(4))]
    (step,) = plan_steps(both, 0, [{"first": (TensorBlock((2, 0), (4, 6)),)}], 1 << 20)
    assert [(move.source, move.target, move.block) for move in step.moves] == [
        (0, 0, TensorBlock((2, 0), (2, 6))),
        (1, 0, TensorBlock((4, 0), (2, 6))),
    ]
    lanes: list[BlocksByName | None] = [None, None]
    twice = [replace(rank, packs=[number == 0] * 2) for number, rank in enumerate(both)]
    (step,) = plan_steps(twice, 0, lanes, 1 << 20)
    assert len(step.moves) == 2, "two lanes of a sender share what it receives"


def test_the_nearest_of_several_holders_gives() -> None:
    ranks = [RankOfTrainer([held("first", [rows(4)[rank % 2]])], [rank in (1, 6)]) for rank in range(8)]
    given_to = {me: plan_steps(ranks, me, [None], 1 << 20)[0].moves for me in range(8)}
    assert {(m.source, m.target) for m in given_to[1]} == {(1, 1), (0, 1)}
    assert {(m.source, m.target) for m in given_to[6]} == {(6, 6), (5, 6)}
    assert given_to[3] == []


def test_ranks_that_disagree_or_hold_too_little_are_refused() -> None:
    upper, lower = rows(4)
    one = RankOfTrainer([held("first", [upper])], [True])
    with pytest.raises(WeightSyncError, match="hold 24 of the 48 elements of first"):
        plan_steps([one], 0, [None], 100)
    other = RankOfTrainer([replace(held("first", [lower]), dtype="bfloat16")], [False])
    with pytest.raises(WeightSyncError, match="disagree on the dtype, shape or place of first"):
        plan_steps([one, other], 0, [None], 100)
