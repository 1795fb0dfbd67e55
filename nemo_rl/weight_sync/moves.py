"""Plan which blocks of the weights the trainer ranks give each other, so that those that pack have what they pack.

Input is what each rank holds and packs, and what each lane's receivers read. A rank gets only the elements that it
packs, each of them once, and from the nearest rank if several hold them. The plan is made once, and used until the
lanes or the weights change.

Invariant: all ranks derive the same steps, with the same slots, from the same descriptions; of the moves each has
those in which it takes part, in an order that both sides of a move share.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import TensorSlot, cut, group_by_size, plan_slots, whole_pieces
from nemo_rl.weight_sync.holdings import Held
from nemo_rl.weight_sync.parts import Part, Parts, whole


@dataclass(frozen=True)
class RankOfTrainer:
    """A trainer rank as the plan sees it."""

    weights: Sequence[Held]
    """Tensors that it holds."""
    packs: Sequence[bool]
    """For each lane, whether it packs its buckets."""


@dataclass(frozen=True)
class Move:
    """A block that a rank gives to another one, or that it packs itself."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Its dtype, without the prefix."""
    block: Part
    """Place of the block in the tensor."""
    source: int
    """Rank that holds it."""
    target: int
    """Rank that packs it."""


@dataclass(frozen=True)
class Layout:
    """A bucket: its slots and its size in bytes."""

    slots: list[TensorSlot]
    num_bytes: int


@dataclass(frozen=True)
class Step:
    """The tensors that are packed together."""

    names: list[str]
    """Names of the tensors."""
    layouts: list[Layout]
    """The bucket of each lane."""
    moves: list[Move]
    """Moves with this rank as source or target."""


@dataclass(frozen=True)
class _Weight:
    """A tensor and the ranks that hold each of its blocks, in ascending order."""

    held: Held
    blocks: dict[Part, list[int]]

    def empty(self) -> tuple[str, torch.Tensor]:
        """Return name and shape as a tensor without values."""
        held = self.held
        return held.name, torch.empty(held.shape, dtype=getattr(torch, held.dtype), device="meta")


def plan_steps(
    ranks: Sequence[RankOfTrainer], me: int, lanes: Sequence[Parts | None], bucket_size_bytes: int
) -> list[Step]:
    """Plan a stream.

    Args:
        ranks: all trainer ranks.
        me: index of this rank.
        lanes: what the receivers of each lane read; None: whole tensors.
        bucket_size_bytes: bytes of whole tensors in a step; a larger tensor has a step of its own.

    Raises:
        WeightSyncError: ranks disagree about a tensor, or do not hold all of it.
    """
    weights = _joined(ranks)
    steps = []
    for group in group_by_size((weight.empty() for weight in weights.values()), bucket_size_bytes):
        pieces = (whole_pieces(group) if parts is None else cut(group, parts) for parts in lanes)
        layouts = [Layout(*plan_slots(list(of_lane))) for of_lane in pieces]
        moves: dict[Move, None] = {}
        for number, layout in enumerate(layouts):
            targets = [target for target, rank in enumerate(ranks) if rank.packs[number]]
            for slot in layout.slots:
                moves |= dict.fromkeys(_moves(weights[slot.name], place_of(slot), targets, me))
        steps.append(Step([name for name, _ in group], layouts, list(moves)))
    return steps


def place_of(slot: TensorSlot) -> Part:
    """Return the part of a tensor that a slot holds."""
    return whole(slot.shape) if slot.part is None else slot.part


def _joined(ranks: Sequence[RankOfTrainer]) -> dict[str, _Weight]:
    """Return the weights of all ranks by name, in the order of the stream."""
    found: dict[str, _Weight] = {}
    for number, rank in enumerate(ranks):
        for held in rank.weights:
            weight = found.setdefault(held.name, _Weight(held, {}))
            if replace(held, blocks=()) != replace(weight.held, blocks=()):
                raise WeightSyncError(f"Trainer ranks disagree on the dtype, shape or place of {held.name}.")
            for block in held.blocks:
                if block.numel:
                    weight.blocks.setdefault(block, []).append(number)
    for name, weight in found.items():
        of_blocks, all_of_it = sum(block.numel for block in weight.blocks), whole(weight.held.shape).numel
        if of_blocks != all_of_it:
            raise WeightSyncError(f"The trainer ranks hold {of_blocks} of the {all_of_it} elements of {name}.")
    return dict(sorted(found.items(), key=lambda item: item[1].held.order))


def _moves(weight: _Weight, wanted: Part, targets: Sequence[int], me: int) -> Iterator[Move]:
    """Yield the moves with `me` as source or target that bring a part of a tensor to the targets."""
    mine = [(block, holders) for block, holders in weight.blocks.items() if me in holders]
    for target in targets:
        for block, holders in weight.blocks.items() if target == me else mine:
            common = block.common(wanted)
            source = _nearest(holders, target)
            if common.numel and me in (source, target):
                yield Move(weight.held.name, weight.held.dtype, common, source, target)


def _nearest(ranks: Sequence[int], target: int) -> int:
    """Return the rank that is next to a target, or is the target: such ranks share a machine most often."""
    after = bisect_left(ranks, target)
    return min(ranks[max(0, after - 1) : after + 1], key=lambda rank: abs(rank - target))
