"""Convert weights between the names and shapes in a model and those in checkpoints on the Hugging Face hub.

transformers renames and fuses some weights when it loads them (the experts of a mixture become one tensor), and
restores the original names and shapes in `save_pretrained`. Checkpoints and engines of this library need the original
names and shapes too, but for one group of tensors at a time, which `save_pretrained` cannot do. The rules are those of
transformers (`transformers.conversion_mapping`).

Invariant: `in_memory` undoes `in_checkpoint` bit for bit; names and shapes are those that `save_pretrained` writes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block


@dataclass(frozen=True)
class Result:
    """A checkpoint tensor that is a block of a model's weight, possibly with reordered dimensions."""

    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    block: TensorBlock
    """Location of the block in the weight."""
    dims: tuple[int | None, ...]
    """For each dimension of the result, the corresponding dimension of the weight, or None if its size is 1."""

    def of(self, place: TensorBlock, values: Tensor) -> tuple[TensorBlock, Tensor] | None:
        """Return the part of this result that a block of the weight contains, given the block's location and values.

        Returns:
            Place of the part in the result, and its values as a view; None if the block contains nothing of the result.
        """
        common = place.common(self.block)
        if not common.numel:
            return None
        inside = common.inside(self.block)
        starts = tuple(0 if dim is None else inside.starts[dim] for dim in self.dims)
        shape = tuple(1 if dim is None else inside.shape[dim] for dim in self.dims)
        kept = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(values.dim()) if dim not in kept]
        return TensorBlock(starts, shape), common.inside(place).of(values).permute(*kept, *rest).view(shape)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are converted together."""

    target: str
    """Name of the result, or of the first of several results."""
    sources: dict[str, str]
    """Pattern of the converter that each tensor matches, by tensor name in the order that the converter needs."""
    converter: WeightConverter | None
    """Converter of transformers. None for a single tensor that is renamed or keeps its name."""

    def convert(self, hf: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of all sources, and return the results by name."""
        if self.converter is None:
            (tensor,) = tensors.values()
            return {self.target: tensor}
        converter: Any = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.target, name, pattern, tensors[name])
        results = converter.convert(self.target, model=hf, config=hf.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}

    def results(self, hf: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, Result] | None:
        """Return the block of the weight for each result by name, given the shapes of the sources.

        Returns:
            The results, or None if there are several sources or a result is not a block of its source.
        """
        if len(self.sources) > 1:
            return None
        ((name, shape),) = shapes.items()
        if self.converter is None:
            return {self.target: Result(tuple(shape), whole_block(shape), tuple(range(len(shape))))}
        source = torch.empty(shape, device="meta")
        try:
            with _OnlyViews():
                converted = self.convert(hf, {name: source})
        except RuntimeError:  # the conversion needs a copy
            return None
        results = {result: _block(source, tensor) for result, tensor in converted.items()}
        return None if None in results.values() else {name: found for name, found in results.items() if found}


class _OnlyViews(TorchDispatchMode):
    """Replace copies with views, so that the strides of a result show the origin of its elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an alias for `clone`. Run all other operations unchanged."""
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def in_checkpoint(hf: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its name and shape in checkpoints.

    Tensors whose name alone changes are yielded unchanged, sharded or not. Tensors that need a converter are gathered
    first if they are sharded, which is collective. Only tensors of incomplete groups are held in memory.

    Args:
        weights: every weight once, by its name in `hf`, and in the same order on all ranks. Tied weights have one name.
    """
    group_of = {name: group for group in groups_in_checkpoint(hf) for name in group.sources}
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        group = group_of[name]
        if group.converter is not None:
            tensor = whole(tensor)
        arrived = held.setdefault(group.target, {})
        arrived[name] = tensor
        if len(arrived) == len(group.sources):
            yield from group.convert(hf, held.pop(group.target)).items()
    assert not held, f"weights that are stored together did not all come: {sorted(held)}"


def groups_in_checkpoint(hf: PreTrainedModel) -> list[TensorGroup]:
    """Return the groups of a model's weights that are converted together to tensors of a checkpoint."""
    names = [name for name, _ in (*hf.named_parameters(), *hf.named_buffers())]
    return _groups(names, [transform.reverse_transform() for transform in reversed(_transforms(hf))], reverse=True)


def in_memory(hf: PreTrainedModel, names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint with their names and shapes in the model.

    Args:
        names: all names of the checkpoint.
        read: reads a tensor by its name; it is called once for each name.
    """
    for group in groups_in_memory(hf, names):
        yield from group.convert(hf, {name: read(name) for name in group.sources}).items()


def groups_in_memory(
    hf: PreTrainedModel, names: Iterable[str], rules: list[WeightTransform] | None = None
) -> list[TensorGroup]:
    """Return the groups of a checkpoint's tensors that are converted together to weights of the model.

    Args:
        hf: the model, on any device.
        names: all names of the checkpoint.
        rules: transformers' rules that rename and convert tensors; if None, the rules with which the model was loaded.
    """
    return _groups(names, _transforms(hf) if rules is None else deepcopy(rules), reverse=False, hf=hf)


def _block(source: Tensor, result: Tensor) -> Result | None:
    """Return which block of a contiguous tensor `source` the tensor `result` is, or None if it is not a block."""
    if StorageWeakRef(result.untyped_storage()) != StorageWeakRef(source.untyped_storage()):
        return None
    strides, position, starts = source.stride(), int(result.storage_offset()), []
    for stride in strides:
        start, position = divmod(position, stride)
        starts.append(start)
    sizes, dims = [1] * source.dim(), list[int | None]()
    for size, stride in zip(result.shape, result.stride(), strict=True):
        found = [dim for dim in range(source.dim()) if strides[dim] == stride and source.shape[dim] > 1]
        dims.append(found[0] if found and size > 1 else None)
        if size > 1 and (not found or starts[found[0]] + size > source.shape[found[0]]):
            return None
        if size > 1:
            sizes[found[0]] = size
    return Result(tuple(result.shape), TensorBlock(tuple(starts), tuple(sizes)), tuple(dims))


def converts(hf: PreTrainedModel) -> bool:
    """Return whether any weight may have another name or shape in checkpoints than in memory."""
    return bool(_transforms(hf))


def _transforms(hf: PreTrainedModel) -> list[WeightTransform]:
    """Return the rules with which the model was loaded or, if it was not loaded, those of its architecture.

    The latter exclude rules that add or drop a prefix, because only a load shows whether they apply.
    """
    used: list[WeightTransform] | None = getattr(hf, "_weight_conversions", None)
    rules = used or [
        rule for rule in get_model_conversion_mapping(hf, add_legacy=False) if not isinstance(rule, PrefixChange)
    ]
    return deepcopy(rules)


def _groups(
    names: Iterable[str], transforms: list[WeightTransform], *, reverse: bool, hf: PreTrainedModel | None = None
) -> list[TensorGroup]:
    """Group names by the converted tensor to which they belong."""
    renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = {} if hf is None else dict.fromkeys(hf.state_dict(keep_vars=True), True)
    prefix = None if hf is None else hf.base_model_prefix
    groups: dict[str, TensorGroup] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known, reverse)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, TensorGroup(target, {}, converter)).sources[name] = pattern or name
    return list(groups.values())
