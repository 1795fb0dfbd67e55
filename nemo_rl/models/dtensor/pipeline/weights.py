"""Collect weights, shared gradients and other values over all stages of a pipeline.

All functions are collective over the stages, and do nothing for a whole model. Invariant: `of_all_stages` yields the
same names and values in the same order on all stages, and holds one group of tensors of another stage at a time.
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
"""Bytes of another stage's tensors that are announced together; a larger tensor is its own group."""


def without_copies(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that this stage exports; skip those that an earlier stage also holds."""
    stage = stage_of(hf)
    for name, tensor in weights:
        if stage is None or name not in stage.copies:
            yield name, tensor


def of_all_stages(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of all stages, stage by stage; each stage broadcasts its own.

    Args:
        hf: the model of this stage.
        weights: whole tensors that this stage exports.

    Yields:
        Name and tensor: unchanged for this stage's weights, on the rank's device for weights of other stages.
    """
    stage = stage_of(hf)
    if stage is None:
        yield from weights
        return
    for source in range(stage.place.size):
        mine = source == stage.place.number
        yield from _sent(weights, stage.place) if mine else _received(source, stage.place)


def names_here(hf: nn.Module) -> dict[str, str]:
    """Return `{checkpoint name: name here}` for weights of this stage that have another name in checkpoints."""
    stage = stage_of(hf)
    return {} if stage is None else {known: name for name, known in stage.renamed.items()}


def joined[T](hf: nn.Module, mine: dict[str, T]) -> dict[str, T]:
    """Merge the dicts of all stages, in the order of the stages."""
    stage = stage_of(hf)
    if stage is None:
        return mine
    parts: list[Any] = [None] * stage.place.size
    dist.all_gather_object(parts, mine, group=stage.place.group)
    return {name: value for part in parts for name, value in part.items()}


def shared_parameters(hf: nn.Module) -> dict[str, nn.Parameter]:
    """Return this stage's copies of parameters that the first and last stage hold (tied embeddings).

    Keys are the names that checkpoints use.
    """
    stage = stage_of(hf)
    if stage is None or not (stage.place.is_first or stage.place.is_last):
        return {}
    named = {stage.known_as(name): parameter for name, parameter in hf.named_parameters()}
    return {name: named[name] for name in sorted(stage.shared) if name in named}


def copied_parameters(hf: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this stage that an earlier stage also holds."""
    stage = stage_of(hf)
    return [] if stage is None else [p for name, p in shared_parameters(hf).items() if name in stage.copies]


@torch.no_grad()
def sum_shared_gradients(hf: nn.Module) -> None:
    """Set the gradients of both copies of a weight to their sum; both get the same bits, because a + b is b + a."""
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
