"""Describe and read the blocks of the weights that this rank holds, as tensors of a hub checkpoint.

Most weights are not gathered. FSDP, tensor and expert parallelism each leave a block of a weight on a rank. A hub
tensor is also a block of a weight, for example one expert of a fused weight. The intersection of the two is read. A
weight is gathered on the ranks of its mesh only if its conversion needs several weights or moves single elements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.distributed.ranks.tensor_block import TensorBlock, block_here, whole_block
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.dtensor.pipeline.stages import stage_of, without_copies
from nemo_rl.models.huggingface.checkpoint_names import Result, TensorGroup, groups_in_checkpoint
from nemo_rl.models.huggingface.load import stays_float32
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS
from nemo_rl.weight_sync.parts import Held, Readable, SharedReads, dtype_name

Value = Callable[[str], Tensor]
"""Function from a weight's name to the exported weight. It is collective over the ranks that divide the weight."""


Results = dict[str, dict[str, Result] | None]
"""Results of `TensorGroup.results` by target, kept between streams because computing them for many experts is slow."""


def held_weights(hf: PreTrainedModel, value: Value, dtype: torch.dtype | None, results: Results) -> Iterator[Readable]:
    """Yield every weight and persistent buffer of this rank. Tied weights occur once.

    Args:
        hf: the model, or this rank's pipeline stage of the model.
        value: see `Value`.
        dtype: type in which floating-point tensors are exported, except those that stay float32
            (`huggingface.load.stays_float32`); if None, types are kept.
        results: cache that this function fills; pass the same dict, initially empty, for every stream of a model.
    """
    named = {
        name: tensor
        for name, tensor in without_copies(hf, weights_by_name(hf).items())
        if not name.endswith(ADAPTER_PARAMETERS)
    }
    stage = stage_of(hf)
    number = 0 if stage is None else stage.place.number
    stays = stays_float32(hf, dtype)
    group_of = {name: group for group in groups_in_checkpoint(hf) for name in group.sources}
    seen: dict[str, list[str]] = {}
    position = 0
    for name, tensor in named.items():
        group = group_of[name]
        arrived = seen.setdefault(group.target, [])
        arrived.append(name)
        if len(arrived) < len(group.sources):
            continue
        sources = {source: named[source] for source in group.sources}
        keeps = dtype is None or not tensor.is_floating_point() or any(map(stays, sources))
        exported = dtype_name(tensor.dtype if keeps or dtype is None else dtype)
        if group.target not in results:
            results[group.target] = group.results(hf, {source: each.shape for source, each in sources.items()})
        found, order = results[group.target], (number, position)
        if found is None:
            yield from _converted_whole(hf, group, list(sources), value, order, exported)
        else:
            yield from _blocks(found, name, tensor, value, order, exported)
        position += 1
    missing = [target for target, names in seen.items() if len(names) < len(group_of[names[0]].sources)]
    assert not missing, f"weights that are stored together did not all come: {missing}"


def _blocks(
    results: Mapping[str, Result], name: str, tensor: Tensor, value: Value, order: tuple[int, int], dtype: str
) -> Iterator[Readable]:
    """Yield the hub tensors that are blocks of a weight of which this rank holds a part.

    A rank without a part of the weight yields all of them without blocks, because reading one may be collective.
    """
    place = block_here(tensor)
    empty = torch.empty(place.shape, device="meta")
    parts = {target: result.of(place, empty) for target, result in results.items()}
    mine = {target for target, part in parts.items() if part is not None or not place.numel}
    once = SharedReads[str](lambda name: held_here(value(name)), len(mine))
    for number, target in enumerate(results):
        if target in mine:
            part, result = parts[target], results[target]
            blocks = () if part is None else (part[0],)
            described = Held(target, dtype, result.shape, (*order, number), blocks)
            yield Readable(described, partial(_read, result, place, name, once))


def _read(result: Result, place: TensorBlock, name: str, once: SharedReads[str]) -> list[Tensor]:
    held = result.of(place, once.of(name))
    return [] if held is None else [held[1]]


def _converted_whole(
    hf: PreTrainedModel, group: TensorGroup, names: Sequence[str], value: Value, order: tuple[int, int], dtype: str
) -> Iterator[Readable]:
    """Yield the hub tensors whose conversion needs whole weights. Reading one of them gathers the weights."""
    weights = weights_by_name(hf)
    empty = {name: torch.empty(weights[name].shape, device="meta") for name in names}
    results: dict[str, Tensor] = {}

    def read(target: str) -> list[Tensor]:
        if not results:
            results.update(group.convert(hf, {name: whole(value(name)) for name in names}))
        return [results.pop(target)]

    for number, (target, tensor) in enumerate(group.convert(hf, empty).items()):
        shape = tuple(tensor.shape)
        described = Held(target, dtype, shape, (*order, number), (whole_block(shape),))
        yield Readable(described, partial(read, target))
