"""Convert weights between the model's names and shapes and those of checkpoints on the Hugging Face hub.

transformers renames and fuses some weights as it loads them (the experts of a mixture become one tensor) and undoes
that in `save_pretrained`. Checkpoints and engines need the original names and shapes too, but one group of tensors at
a time, which `save_pretrained` cannot do. The rules are those of transformers (`transformers.conversion_mapping`).

Invariant: `in_memory` undoes `in_checkpoint` bit for bit; names and shapes are those that `save_pretrained` writes.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
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


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together.

    Attributes:
        target: name of the result; of the first result if there are several.
        sources: `{name: pattern of the converter that it matches}`, in the order that the converter requires.
        converter: None if the single tensor only gets another name, or keeps its name.
    """

    target: str
    sources: dict[str, str]
    converter: WeightConverter | None

    def convert(self, hf: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of all sources to named results."""
        if self.converter is None:
            (tensor,) = tensors.values()
            return {self.target: tensor}
        converter: Any = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.target, name, pattern, tensors[name])
        results = converter.convert(self.target, model=hf, config=hf.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def in_checkpoint(hf: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its name and shape in checkpoints.

    Tensors that only change their name are yielded unchanged, sharded or not. Tensors that change their shape are
    gathered first if they are sharded, which is collective. Only tensors of incomplete groups are held in memory.

    Args:
        hf: the model.
        weights: every weight once, by its name in `hf`, tied ones under one name, in the same order on all ranks.
    """
    names = [name for name, _ in (*hf.named_parameters(), *hf.named_buffers())]
    undo = [transform.reverse_transform() for transform in reversed(_transforms(hf))]
    group_of = {name: group for group in _groups(names, undo, reverse=True) for name in group.sources}
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


def in_memory(hf: PreTrainedModel, names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint with their names and shapes in the model.

    Args:
        hf: the model.
        names: all names of the checkpoint.
        read: reads the tensor of a name; called once for each.
    """
    for group in groups_in_memory(hf, names):
        yield from group.convert(hf, {name: read(name) for name in group.sources}).items()


def groups_in_memory(
    hf: PreTrainedModel, names: Iterable[str], rules: list[WeightTransform] | None = None
) -> list[Group]:
    """Group the tensors of a checkpoint that become one weight of the model.

    Args:
        hf: the model, on any device.
        names: all names of the checkpoint.
        rules: rules by which a load renames and converts; None takes those with which the model was loaded.
    """
    return _groups(names, _transforms(hf) if rules is None else deepcopy(rules), reverse=False, hf=hf)


def converts(hf: PreTrainedModel) -> bool:
    """Return whether any weight may have another name or shape in checkpoints than in memory."""
    return bool(_transforms(hf))


def _transforms(hf: PreTrainedModel) -> list[WeightTransform]:
    """Return the rules with which the model was loaded, or else those of its architecture.

    Only a load shows whether a prefix was dropped, so rules of the architecture add no prefix.
    """
    used: list[WeightTransform] | None = getattr(hf, "_weight_conversions", None)
    rules = used or [
        rule for rule in get_model_conversion_mapping(hf, add_legacy=False) if not isinstance(rule, PrefixChange)
    ]
    return deepcopy(rules)


def _groups(
    names: Iterable[str], transforms: list[WeightTransform], *, reverse: bool, hf: PreTrainedModel | None = None
) -> list[Group]:
    """Group names by the result they belong to.

    Args:
        names: names of the tensors to convert.
        transforms: the rules, in order.
        reverse: whether the rules undo a load; then converters are applied before renamings.
        hf: the model, for a load: names of a body without a head get its prefix, and names that the model has stay.
    """
    renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = {} if hf is None else dict.fromkeys(hf.state_dict(keep_vars=True), True)
    prefix = None if hf is None else hf.base_model_prefix
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known, reverse)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, Group(target, {}, converter)).sources[name] = pattern or name
    return list(groups.values())
