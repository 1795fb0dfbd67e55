"""Move weights to the trainer ranks that pack for engines of several layouts, and measure what travels."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.weight_sync.buckets import cut, view_of
from nemo_rl.weight_sync.exchange import BlockExchange, BlockReader, everywhere, fill
from nemo_rl.weight_sync.lanes import plan_lanes
from nemo_rl.weight_sync.parts import BlocksByName, HeldWeights

ENGINES = ("tp1", "tp2", "pp2")
"""Layouts of engines."""
_COLUMNS = ("o_proj.weight", "down_proj.weight")
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")


def reads_of(engine: str, tensors: dict[str, Tensor]) -> list[BlocksByName]:
    """Return what each rank of an engine reads, as its loaders do it: halves of projections, or of the layers."""
    if engine == "tp1":
        return [{name: (whole_block(tensor.shape),) for name, tensor in tensors.items()}]
    if engine == "tp2":
        return [{name: (_half(name, tensor, rank),) for name, tensor in tensors.items()} for rank in range(2)]
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    return [
        {
            name: (whole_block(tensor.shape),)
            for name, tensor in tensors.items()
            if rank in _stages(name, layers, tensors)
        }
        for rank in range(2)
    ]


def _half(name: str, tensor: Tensor, rank: int) -> TensorBlock:
    place = whole_block(tensor.shape)
    dim = 1 if name.endswith(_COLUMNS) else 0 if any(kind in name for kind in _ROWS) else None
    if dim is None:
        return place
    sizes = [size // 2 if axis == dim else size for axis, size in enumerate(tensor.shape)]
    return TensorBlock(tuple(rank * sizes[dim] if axis == dim else 0 for axis in range(tensor.dim())), tuple(sizes))


def _stages(name: str, layers: int, tensors: dict[str, Tensor]) -> set[int]:
    if name.startswith("model.layers."):
        return {int(int(name.split(".")[2]) >= layers // 2)}
    if name == "model.embed_tokens.weight":
        return {0} if "lm_head.weight" in tensors else {0, 1}
    return {1}


def exchanged(held_weights: Callable[[], HeldWeights], bucket_size_bytes: int = 20_000) -> dict[str, Any]:
    """Pack weights in bfloat16 for each layout of engines; check each packed tensor, bit for bit.

    Returns:
        By layout: `engine` bytes of each engine rank, `trainer` bytes that this rank received from other ranks, and
        `least` bytes of what it packs and does not hold; `whole` and `held` are bytes of all weights, and of this
        rank's part of them.
    """
    tensors = {name: tensor.clone() for name, tensor in everywhere(held_weights(), dist.group.WORLD)}
    held = held_weights().described()
    found: dict[str, Any] = {
        "whole": sum(tensor.nbytes for tensor in tensors.values()),
        "held": sum(block.numel * tensors[each.name].element_size() for each in held for block in each.blocks),
    }
    for engine in ENGINES:
        found[engine] = _for(engine, tensors, held_weights(), bucket_size_bytes)
    return found


def _for(engine: str, tensors: dict[str, Tensor], weights: HeldWeights, bucket_size_bytes: int) -> dict[str, Any]:
    reads, me = reads_of(engine, tensors), dist.get_rank()
    lanes = plan_lanes(reads, len(reads), dist.get_world_size())
    exchange = BlockExchange(dist.group.WORLD)
    least = _least(tensors, weights, [lane.parts for lane in lanes if lane.sender == me])
    packs = [lane.sender == me for lane in lanes]
    steps = exchange.plan(weights, packs, [lane.parts for lane in lanes], bucket_size_bytes)
    reader = BlockReader(weights)
    for step in steps:
        blocks = exchange.run(step, reader.read(step), weights.device)
        for lane, layout in zip(lanes, step.layouts, strict=True):
            if lane.sender != me:
                continue
            flat = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
            fill(flat, layout, blocks)
            expected = cut([(name, tensors[name]) for name in step.names], lane.parts)
            for slot, piece in zip(layout.slots, expected, strict=True):
                assert torch.equal(view_of(flat, slot), piece.values), f"{engine}: {slot.name}"
    reader.end()
    of_lanes = [sum(step.layouts[number].num_bytes for step in steps) for number in range(len(lanes))]
    return {"engine": of_lanes, "trainer": exchange.received_bytes, "least": least}


def _least(tensors: dict[str, Tensor], weights: HeldWeights, packed: list[BlocksByName]) -> int:
    """Count the bytes that a rank packs and does not hold, element by element."""
    missing = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for parts in packed:
        for name, wanted in parts.items():
            for part in wanted:
                part.of(missing[name]).fill_(True)
    for each in weights.described():
        for block in each.blocks:
            block.of(missing[each.name]).fill_(False)
    return sum(int(of_tensor.sum()) * tensors[name].element_size() for name, of_tensor in missing.items())
