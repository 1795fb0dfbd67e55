"""Fill buckets from the blocks of all trainer ranks: plan moves of blocks, exchange the blocks, and encode weights.

`plan_steps` plans which blocks of weights the trainer ranks send to the ranks that pack buckets. The plan follows from
the blocks that each rank holds, from the lanes for which it packs, and from the parts that the receivers of each lane
read. A rank receives only elements that it packs, each of them once, and from the nearest rank if several hold them.
The plan is used until the lanes or the weights change. Invariant: all ranks derive the same steps and slots from the
same descriptions. Each rank's plan has the moves in which it takes part, and both sides of a move have the same order.

`BlockExchange` carries out the moves. All blocks of a step that go from one rank to another are one message. Invariant:
both sides place the blocks of a message in the order of the plan, so no description is sent with them.

An `Encoding` replaces weights by other tensors, such as float8 values and scales, when a bucket is packed. Only whole
tensors can be encoded, so it needs lanes of whole tensors. Invariant: fingerprints are those of the encoded bytes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import BucketEntry, TensorSlot, cut, group_by_size, pack, plan_slots, view_of
from nemo_rl.weight_sync.parts import BlocksByName, Held, HeldWeights


@dataclass(frozen=True)
class RankOfTrainer:
    """Description of a trainer rank for the plan."""

    weights: Sequence[Held]
    """Tensors that the rank holds blocks of."""
    packs: Sequence[bool]
    """Whether the rank packs the buckets of each lane."""


@dataclass(frozen=True)
class Move:
    """A block that a rank sends to another rank, or that it packs itself."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Dtype of the tensor without its prefix, for example "bfloat16"."""
    block: TensorBlock
    """Location of the block in the tensor."""
    source: int
    """Rank that holds the block."""
    target: int
    """Rank that packs the block."""


@dataclass(frozen=True)
class BucketLayout:
    """Slots of a bucket, with its size in bytes."""

    slots: list[TensorSlot]
    num_bytes: int


@dataclass(frozen=True)
class PackingStep:
    """The tensors that are packed together."""

    names: list[str]
    """Names of the tensors."""
    layouts: list[BucketLayout]
    """The bucket of each lane."""
    moves: list[Move]
    """Moves with this rank as source or target."""


@dataclass(frozen=True)
class _Weight:
    """A tensor with the ranks that hold each of its blocks, in ascending order."""

    held: Held
    blocks: dict[TensorBlock, list[int]]

    def empty(self) -> tuple[str, torch.Tensor]:
        """Return the name, and a meta tensor with the shape and dtype of the weight."""
        held = self.held
        return held.name, torch.empty(held.shape, dtype=getattr(torch, held.dtype), device="meta")


def plan_steps(
    ranks: Sequence[RankOfTrainer], me: int, lanes: Sequence[BlocksByName | None], bucket_size_bytes: int
) -> list[PackingStep]:
    """Return the steps of a stream.

    Args:
        ranks: all trainer ranks.
        me: index of this rank.
        lanes: for each lane, the parts that its receivers read, or None for whole tensors.
        bucket_size_bytes: largest size of the whole tensors in a step; a larger tensor has a step of its own.

    Raises:
        WeightSyncError: ranks disagree about a tensor, or do not hold all of it.
    """
    weights = _joined(ranks)
    steps = []
    for group in group_by_size((weight.empty() for weight in weights.values()), bucket_size_bytes):
        layouts = [BucketLayout(*plan_slots(cut(group, parts))) for parts in lanes]
        moves: dict[Move, None] = {}
        for number, layout in enumerate(layouts):
            targets = [target for target, rank in enumerate(ranks) if rank.packs[number]]
            for slot in layout.slots:
                moves |= dict.fromkeys(_moves(weights[slot.name], place_of(slot), targets, me))
        steps.append(PackingStep([name for name, _ in group], layouts, list(moves)))
    return steps


def place_of(slot: TensorSlot) -> TensorBlock:
    """Return the location, in its tensor, of a slot's values."""
    return whole_block(slot.shape) if slot.part is None else slot.part


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
        of_blocks, all_of_it = sum(block.numel for block in weight.blocks), whole_block(weight.held.shape).numel
        if of_blocks != all_of_it:
            raise WeightSyncError(f"The trainer ranks hold {of_blocks} of the {all_of_it} elements of {name}.")
    return dict(sorted(found.items(), key=lambda item: item[1].held.order))


def _moves(weight: _Weight, wanted: TensorBlock, targets: Sequence[int], me: int) -> Iterator[Move]:
    """Yield the moves of a part of a tensor to the targets, if the rank `me` is source or target."""
    mine = [(block, holders) for block, holders in weight.blocks.items() if me in holders]
    for target in targets:
        for block, holders in weight.blocks.items() if target == me else mine:
            common = block.common(wanted)
            source = _nearest(holders, target)
            if common.numel and me in (source, target):
                yield Move(weight.held.name, weight.held.dtype, common, source, target)


def _nearest(ranks: Sequence[int], target: int) -> int:
    """Return the rank whose number is nearest to that of the target, because such ranks are usually on one machine."""
    after = bisect_left(ranks, target)
    return min(ranks[max(0, after - 1) : after + 1], key=lambda rank: abs(rank - target))


_STEP_BYTES = 4 * 1024**2
"""Bytes of whole tensors that `everywhere` sends together."""

Blocks = Sequence[tuple[TensorBlock, torch.Tensor]]
"""Blocks of a tensor, as pairs of a location in the tensor and the values."""


class BlockExchange:
    """Exchanges blocks of weights between the trainer ranks.

    Args:
        group: all trainer ranks; None if this rank is the only one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self.received_bytes = 0
        """Number of bytes that this rank has received from other ranks so far."""

    def plan(
        self,
        weights: HeldWeights,
        packs: Sequence[bool],
        lanes: Sequence[BlocksByName | None],
        bucket_size_bytes: int,
    ) -> list[PackingStep]:
        """Return the steps of a stream (`plan_steps`). The call is collective.

        Args:
            weights: weights that this rank holds blocks of.
            packs: for each lane, whether this rank packs its buckets.
        """
        mine = RankOfTrainer(weights.described(), packs)
        if self._group is None:
            return plan_steps([mine], 0, lanes, bucket_size_bytes)
        ranks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(ranks, mine, group=self._group)
        return plan_steps(ranks, self._rank, lanes, bucket_size_bytes)

    def run(
        self, step: PackingStep, blocks: Mapping[str, Blocks], device: torch.device
    ) -> dict[str, list[tuple[TensorBlock, torch.Tensor]]]:
        """Send and receive the blocks of a step, together with all ranks that take part in it.

        Args:
            blocks: this rank's blocks of the step's tensors, by name.

        Returns:
            The blocks that this rank packs, by the name of the tensor; they may share memory with `blocks`.
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
        found: dict[str, list[tuple[TensorBlock, torch.Tensor]]] = {}
        for move, values in arrived:
            found.setdefault(move.name, []).append((move.block, values))
        return found

    def _sends(
        self, leaving: Sequence[tuple[Move, torch.Tensor]], device: torch.device
    ) -> tuple[list[P2POp], list[torch.Tensor]]:
        """Return one message to each target rank, and the buffers. Equal messages share a buffer."""
        pieces: dict[int, list[BucketEntry]] = {}
        for move, values in leaving:
            pieces.setdefault(move.target, []).append(BucketEntry(move.name, values, move.block))
        packed: dict[tuple[tuple[str, TensorBlock | None], ...], torch.Tensor] = {}
        sends = []
        for target in sorted(pieces):
            content = tuple((piece.name, piece.part) for piece in pieces[target])
            if content not in packed:
                slots, num_bytes = plan_slots(pieces[target])
                packed[content] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                pack(pieces[target], slots, packed[content])
            sends.append(P2POp(dist.isend, packed[content], group=self._group, group_peer=target))
        return sends, list(packed.values())


def _cut(blocks: Blocks, wanted: TensorBlock) -> torch.Tensor:
    """Return a part of a tensor, as a view of the block that contains it."""
    place, values = next(block for block in blocks if block[0].common(wanted) == wanted)
    return wanted.inside(place).of(values)


def _expected(move: Move) -> BucketEntry:
    dtype = getattr(torch, move.dtype)
    return BucketEntry(move.name, torch.empty(move.block.shape, dtype=dtype, device="meta"), move.block)


def fill(flat: torch.Tensor, layout: BucketLayout, blocks: Mapping[str, Blocks]) -> None:
    """Copy blocks into the slots of a bucket.

    Args:
        flat: the bucket's bytes, uint8.
        blocks: blocks by the name of their tensor, which together cover all slots.
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
    """Read a rank's blocks step by step. All ranks must read all steps, because reading may be collective."""

    def __init__(self, weights: HeldWeights) -> None:
        self._described = {held.name: held for held in weights.described()}
        self._values = weights.values()

    def read(self, step: PackingStep) -> dict[str, list[tuple[TensorBlock, torch.Tensor]]]:
        """Return this rank's blocks of a step's tensors. Call this in the order of the planned steps."""
        found = {}
        for name in step.names:
            if name in self._described:
                found[name] = list(zip(self._described[name].blocks, next(self._values), strict=True))
        return found

    def end(self) -> None:
        """Exhaust the iterator of values, so that the code after its last value runs."""
        assert next(self._values, None) is None, "the weights are more than was described"


def everywhere(weights: HeldWeights, group: dist.ProcessGroup | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor of each weight on every rank. The call is collective.

    The yielded tensors may share memory with each other.

    Raises:
        WeightSyncError: raised by `plan_steps`.
    """
    exchange, reader = BlockExchange(group), BlockReader(weights)
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


class Encoding(Protocol):
    """Interface that converts weights to the tensors that are sent instead."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the encoding changes a weight."""

    def described(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype (without its prefix) and shape of each tensor sent for a weight."""

    def encode(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors sent for a weight, in the order of `described`."""


def check_used(encoding: Encoding, weights: Iterable[TensorSlot]) -> None:
    """Refuse an encoding that changes no weight of a model.

    Raises:
        WeightSyncError: the encoding changes no weight.
    """
    slots = list(weights)
    if not any(encoding.takes(slot.name, slot.shape) for slot in slots):
        raise WeightSyncError(
            "policy.generation.vllm_cfg.precision=fp8, but no weight of the model would be in float8: it has "
            f"{', '.join(slot.name for slot in slots[:4])} and others. Quantized are matrices of decoder layers "
            "(model.layers.0.mlp.up_proj.weight), but not those that num_first_layers_in_bf16, "
            "num_last_layers_in_bf16 and quantization_ignored_layer_kws exclude. Set the precision to bfloat16."
        )


def encoded_layout(layout: BucketLayout, encoding: Encoding) -> BucketLayout:
    """Return the layout of the encoded bucket that is sent instead of a bucket of whole weights."""
    pieces = [
        BucketEntry(name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for slot in layout.slots
        for name, dtype, shape in encoding.described(slot.name, slot.dtype, slot.shape)
    ]
    return BucketLayout(*plan_slots(pieces))


def fill_encoded(
    flat: torch.Tensor, sent: BucketLayout, layout: BucketLayout, blocks: Mapping[str, Blocks], encoding: Encoding
) -> None:
    """Encode weights, one after another, into the slots of the sent bucket.

    Args:
        flat: bytes of the sent bucket, uint8.
        sent: slots of the sent bucket.
        layout: slots of the bucket of whole weights.
        blocks: blocks by the name of their weight, which together cover all slots of `layout`.
    """
    targets = iter(sent.slots)
    for slot in layout.slots:
        held = blocks.get(slot.name)
        device = held[0][1].device if held else flat.device
        whole = torch.empty(slot.num_bytes, dtype=torch.uint8, device=device)
        alone = replace(slot, offset=0)
        fill(whole, BucketLayout([alone], slot.num_bytes), blocks)
        for tensor in encoding.encode(slot.name, view_of(whole, alone)):
            view_of(flat, next(targets)).copy_(tensor)
