"""Carry out the moves of a plan (`moves`): trainer ranks give blocks of weights to the ranks that pack them.

All blocks of a step that go from one rank to another travel as one message. Invariant: both sides of a message place
its blocks in the order of the plan, so no description travels with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv

from nemo_rl.weight_sync.buckets import Piece, TensorSlot, pack, plan_slots, view_of
from nemo_rl.weight_sync.holdings import HeldWeights
from nemo_rl.weight_sync.moves import Layout, Move, RankOfTrainer, Step, place_of, plan_steps
from nemo_rl.weight_sync.parts import Part, Parts

_STEP_BYTES = 4 * 1024**2
"""Bytes of whole tensors that `everywhere` moves together."""

Blocks = Sequence[tuple[Part, torch.Tensor]]
"""Blocks of a tensor: their places in it, and their values."""


class Exchange:
    """The trainer ranks, seen from one of them.

    Args:
        group: the ranks; None: this rank is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self.received_bytes = 0
        """Bytes that this rank has received from other ranks so far."""

    def plan(
        self,
        weights: HeldWeights,
        packs: Sequence[bool],
        lanes: Sequence[Parts | None],
        bucket_size_bytes: int,
    ) -> list[Step]:
        """Plan a stream; collective. Arguments as in `moves`; `packs` is about this rank.

        Raises:
            WeightSyncError: see `plan_steps`.
        """
        mine = RankOfTrainer(weights.described(), packs)
        if self._group is None:
            return plan_steps([mine], 0, lanes, bucket_size_bytes)
        ranks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(ranks, mine, group=self._group)
        return plan_steps(ranks, self._rank, lanes, bucket_size_bytes)

    def run(
        self, step: Step, blocks: Mapping[str, Blocks], device: torch.device
    ) -> dict[str, list[tuple[Part, torch.Tensor]]]:
        """Give and take the blocks of a step; collective over the ranks that give or take any.

        Args:
            step: what moves.
            blocks: this rank's blocks of the step's tensors, by name.
            device: device of the blocks.

        Returns:
            The blocks that this rank packs, by name of the tensor; they may share memory with its own.
        """
        kept = [(move, _cut(blocks[move.name], move.block)) for move in step.moves if move.source == self._rank]
        arrived = [(move, values) for move, values in kept if move.target == self._rank]
        sends, buffers = self._sends([(move, values) for move, values in kept if move.target != self._rank], device)
        receipts = []
        for source in sorted({move.source for move in step.moves} - {self._rank}):
            moves = [move for move in step.moves if move.source == source]
            slots, num_bytes = plan_slots([_expected(move) for move in moves])
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            receipts.append(P2POp(dist.irecv, flat, group=self._group, group_peer=source))
            arrived += [(move, view_of(flat, slot)) for move, slot in zip(moves, slots, strict=True)]
            self.received_bytes += num_bytes
        for work in batch_isend_irecv(sends + receipts) if sends or receipts else ():
            work.wait()
        del buffers
        found: dict[str, list[tuple[Part, torch.Tensor]]] = {}
        for move, values in arrived:
            found.setdefault(move.name, []).append((move.block, values))
        return found

    def _sends(
        self, leaving: Sequence[tuple[Move, torch.Tensor]], device: torch.device
    ) -> tuple[list[P2POp], list[torch.Tensor]]:
        """Return one message to each other rank, and their buffers; ranks that get the same share a buffer."""
        pieces: dict[int, list[Piece]] = {}
        for move, values in leaving:
            pieces.setdefault(move.target, []).append(Piece(move.name, values, move.block))
        packed: dict[tuple[tuple[str, Part | None], ...], torch.Tensor] = {}
        sends = []
        for target in sorted(pieces):
            content = tuple((piece.name, piece.part) for piece in pieces[target])
            if content not in packed:
                slots, num_bytes = plan_slots(pieces[target])
                packed[content] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                pack(pieces[target], slots, packed[content])
            sends.append(P2POp(dist.isend, packed[content], group=self._group, group_peer=target))
        return sends, list(packed.values())


def _cut(blocks: Blocks, wanted: Part) -> torch.Tensor:
    """Return a part of a tensor from the block that contains it, as a view."""
    place, values = next(block for block in blocks if block[0].common(wanted) == wanted)
    return wanted.inside(place).of(values)


def _expected(move: Move) -> Piece:
    dtype = getattr(torch, move.dtype)
    return Piece(move.name, torch.empty(move.block.shape, dtype=dtype, device="meta"), move.block)


def fill(flat: torch.Tensor, layout: Layout, blocks: Mapping[str, Blocks]) -> None:
    """Copy blocks into the slots of a bucket.

    Args:
        flat: uint8, the bucket's bytes.
        layout: its slots.
        blocks: by name of the tensor; together they cover all slots.
    """
    for slot in layout.slots:
        _fill_slot(view_of(flat, slot), slot, blocks.get(slot.name, ()))


def _fill_slot(values: torch.Tensor, slot: TensorSlot, blocks: Blocks) -> None:
    wanted = place_of(slot)
    for place, block in blocks:
        common = place.common(wanted)
        if common.numel:
            common.inside(wanted).of(values).copy_(common.inside(place).of(block))


class BlockReader:
    """Reads a rank's blocks step by step; all ranks read to the end."""

    def __init__(self, weights: HeldWeights) -> None:
        self._described = {held.name: held for held in weights.described()}
        self._values = weights.values()

    def read(self, step: Step) -> dict[str, list[tuple[Part, torch.Tensor]]]:
        """Return this rank's blocks of a step's tensors; the steps come in the order of the plan."""
        found = {}
        for name in step.names:
            if name in self._described:
                found[name] = list(zip(self._described[name].blocks, next(self._values), strict=True))
        return found

    def end(self) -> None:
        """Run what the weights do after the last one was read."""
        assert next(self._values, None) is None, "the weights are more than was described"


def everywhere(weights: HeldWeights, group: dist.ProcessGroup | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole tensor of each weight, on every rank; collective.

    Tensors may share memory with others that are yielded.

    Raises:
        WeightSyncError: see `plan_steps`.
    """
    exchange, reader = Exchange(group), BlockReader(weights)
    for step in exchange.plan(weights, [True], [None], _STEP_BYTES):
        (layout,) = step.layouts
        arrived = exchange.run(step, reader.read(step), weights.device)
        flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=weights.device)
        fill(flat, layout, arrived)
        del arrived
        for slot in layout.slots:
            yield slot.name, view_of(flat, slot)
        del flat
    reader.end()
