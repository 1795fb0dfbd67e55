"""What reaches over all stages of a pipeline: exported weights, shared gradients, things to agree on.

Everything here is collective over the stages, and does nothing for a whole model. Invariant: `of_all_stages` gives the
same names and values in the same order on all of them, and holds one group of tensors of another stage at a time.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.models.dtensor.pipeline.stages import Place, stage_of
from nemo_rl.weight_sync.buckets import group_by_size

_GROUP_BYTES = 64 * 1024**2
"""Tensors of another stage that are announced together; a larger tensor is a group of its own."""


def without_copies(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights that leave from this stage: not those that an earlier one holds too."""
    stage = stage_of(hf)
    for name, tensor in weights:
        if stage is None or name not in stage.copies:
            yield name, tensor


def of_all_stages(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of all stages, stage by stage; each broadcasts its own.

    Args:
        hf: the model of this stage.
        weights: whole tensors that leave from this stage.

    Yields:
        Those of this stage as they are, those of others on the rank's device.
    """
    stage = stage_of(hf)
    if stage is None:
        yield from weights
        return
    for source in range(stage.place.size):
        mine = source == stage.place.number
        yield from _sent(weights, stage.place) if mine else _received(source, stage.place)


def names_here(hf: nn.Module) -> dict[str, str]:
    """Names in this stage's model of weights that checkpoints know by another one: `{known name: name}`."""
    stage = stage_of(hf)
    return {} if stage is None else {known: name for name, known in stage.renamed.items()}


def joined[T](hf: nn.Module, mine: dict[str, T]) -> dict[str, T]:
    """One dict from the dicts of all stages, in the order of the stages."""
    stage = stage_of(hf)
    if stage is None:
        return mine
    parts: list[Any] = [None] * stage.place.size
    dist.all_gather_object(parts, mine, group=stage.place.group)
    return {name: value for part in parts for name, value in part.items()}


def shared_parameters(hf: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of this stage that the first and the last one both hold (tied embeddings), by their known names."""
    stage = stage_of(hf)
    if stage is None or not (stage.place.is_first or stage.place.is_last):
        return {}
    named = {stage.known_as(name): parameter for name, parameter in hf.named_parameters()}
    return {name: named[name] for name in sorted(stage.shared) if name in named}


def copied_parameters(hf: nn.Module) -> list[nn.Parameter]:
    """Parameters of this stage that an earlier one holds too."""
    stage = stage_of(hf)
    return [] if stage is None else [p for name, p in shared_parameters(hf).items() if name in stage.copies]


@torch.no_grad()
def sum_shared_gradients(hf: nn.Module) -> None:
    """Give both copies of a weight the sum of their gradients, bit for bit the same: a + b is b + a."""
    stage = stage_of(hf)
    for parameter in shared_parameters(hf).values():
        if not parameter.requires_grad:
            continue
        assert stage is not None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = held_here(parameter.grad)
        mine = local.to(stage.place.device).contiguous()
        theirs = torch.empty_like(mine)
        peer = stage.place.size - 1 - stage.place.number
        group = stage.place.group
        exchange = [
            P2POp(dist.isend, mine, group=group, group_peer=peer),
            P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in batch_isend_irecv(exchange):
            work.wait()
        local.add_(theirs)


def _sent(weights: Iterable[tuple[str, Tensor]], place: Place) -> Iterator[tuple[str, Tensor]]:
    for group in group_by_size(weights, _GROUP_BYTES):
        described = [(name, tensor.shape, tensor.dtype) for name, tensor in group]
        dist.broadcast_object_list([described], group=place.group, group_src=place.number)
        for name, tensor in group:
            dist.broadcast(tensor.to(place.device).contiguous(), group=place.group, group_src=place.number)
            yield name, tensor
    dist.broadcast_object_list([[]], group=place.group, group_src=place.number)


def _received(source: int, place: Place) -> Iterator[tuple[str, Tensor]]:
    while True:
        announced: list[Any] = [None]
        dist.broadcast_object_list(announced, group=place.group, group_src=source)
        if not announced[0]:
            return
        for name, shape, dtype in announced[0]:
            tensor = torch.empty(shape, dtype=dtype, device=place.device)
            dist.broadcast(tensor, group=place.group, group_src=source)
            yield name, tensor
