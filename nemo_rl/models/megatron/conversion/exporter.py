"""Gather the weights of a Megatron Core model on every rank, under the names and shapes of the hub.

The ranks go through the model together. For each parameter the tensor-parallel ranks gather their shards, the rank that
holds an expert broadcasts it to the other expert ranks, and the pipeline stage broadcasts it to the other stages.

Invariant: all ranks yield the same names and values in the same order, and besides their own shards hold one parameter
and one of its hub tensors at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.models.megatron.conversion.holdings import Groups, Holder, held_here, holders
from nemo_rl.models.megatron.conversion.parts import Rule
from nemo_rl.models.megatron.conversion.rules import Rules, rules_for
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS


def iterate_hf_weights(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    has_scalar_head: bool = False,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight and persistent buffer, tied ones once; collective over all ranks of a model.

    Parameters of adapters are skipped, because the hub's model does not have them.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        hf_config: Hugging Face configuration of the model.
        device: device on which tensors are gathered and yielded.
        dtype: dtype of the yielded tensors; None keeps that of the parameters. Correction biases of routers stay in
            float32, as in engines.
        has_scalar_head: whether the output layer is a reward model's scalar head.
        value: maps this rank's shard of a parameter to the tensor to export.

    Yields:
        Name and tensor; a tensor may be a view of a parameter.

    Raises:
        CheckpointError: the model has parameters that the configuration does not describe, or lacks some.
    """
    rules, groups = rules_for(hf_config, has_scalar_head=has_scalar_head), Groups.current()
    held = held_here(chunks, rules, groups)
    weights = {name: tensor for name, tensor in held.items() if not name.endswith(ADAPTER_PARAMETERS)}
    yield from gathered(weights, rules, groups, device=device, dtype=dtype, value=value)


def gathered(
    held: Mapping[str, Tensor],
    rules: Rules,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the hub tensors of all parameters that the rules describe; see `iterate_hf_weights`.

    Args:
        held: this rank's shards, by their names in the whole model.
        rules: rules of these parameters.
        groups: process groups of the mesh.
        device: see `iterate_hf_weights`.
        dtype: see `iterate_hf_weights`.
        value: see `iterate_hf_weights`.
    """
    walk = _Walk(held, holders(held, rules, groups), groups, device, dtype, value)
    for bundle in rules.bundles():
        yield from walk.stack(bundle) if len(bundle) > 1 else walk.parts(bundle[0])


@dataclass(frozen=True)
class _Walk:
    """One pass over the model.

    Attributes:
        held: this rank's shards.
        holders: location of every parameter.
        groups: process groups of the mesh.
        device: device of the results.
        dtype: dtype of the results, see `iterate_hf_weights`.
        value: maps a shard to the tensor to export.
    """

    held: Mapping[str, Tensor]
    holders: dict[str, Holder]
    groups: Groups
    device: torch.device
    dtype: torch.dtype | None
    value: Callable[[Tensor], Tensor]

    def parts(self, rule: Rule) -> Iterator[tuple[str, Tensor]]:
        """Yield the hub tensors that make up a parameter."""
        in_stage = self._in_stage(rule)
        shards = self._shards(rule) if in_stage else []
        for index, part in enumerate(rule.parts):
            tensor = self._part(rule, index, shards) if in_stage else self._empty(rule, self._shape(rule, index))
            yield part.name, self._from_stage(rule, tensor)

    def stack(self, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
        """Yield the one hub tensor that stacks the same parameter of all experts."""
        first = rules[0]
        shape = first.parts[0].tensor_shape(self._shape(first, 0), len(rules))
        stack = self._empty(first, shape)
        if self._in_stage(first):
            for rule in rules:
                shards = self._shards(rule)
                for index, part in enumerate(rule.parts):
                    part.of(stack).copy_(self._part(rule, index, shards))
        yield first.parts[0].name, self._from_stage(first, stack)

    def _in_stage(self, rule: Rule) -> bool:
        return self.holders[rule.parameter].stage == self.groups.pipeline.rank()

    def _shape(self, rule: Rule, index: int) -> tuple[int, ...]:
        """Return the shape of a part."""
        return rule.part_shapes(self.holders[rule.parameter].shape, self.groups.num_shards(rule))[index]

    def _dtype(self, rule: Rule) -> torch.dtype:
        kept = self.holders[rule.parameter].dtype
        return kept if self.dtype is None or rule.full_precision else self.dtype

    def _empty(self, rule: Rule, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self._dtype(rule), device=self.device)

    def _shards(self, rule: Rule) -> list[Tensor]:
        """Gather all shards of a parameter; joined to one tensor if they form one part, empty if this rank has none."""
        if rule.parameter not in self.held:
            return []
        mine = self.value(self.held[rule.parameter]).to(self.device, self._dtype(rule))
        num_shards, group = self.groups.num_shards(rule), self.groups.dividing(rule)
        if num_shards == 1:
            return [mine]
        if rule.dim == 0 and len(rule.parts) == 1:
            whole = self._empty(rule, (len(mine) * num_shards, *mine.shape[1:]))
            dist.all_gather(list(whole.chunk(num_shards)), mine.contiguous(), group=group)
            return [whole]
        shards = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(num_shards)]
        dist.all_gather(shards, mine.contiguous(), group=group)
        return [torch.cat(shards, dim=1)] if rule.dim == 1 else shards

    def _part(self, rule: Rule, index: int, shards: list[Tensor]) -> Tensor:
        """Return a part of a parameter of this stage, on all ranks of the stage."""
        shape = self._shape(rule, index)
        part = rule.joined(index, shards) if shards else self._empty(rule, shape)
        assert part.shape == shape, f"{rule.parts[index].name}: {tuple(part.shape)} instead of {shape}"
        if rule.expert is not None and self.groups.expert.size() > 1:
            part = part.contiguous()
            dist.broadcast(part, group=self.groups.expert, group_src=self.holders[rule.parameter].expert_rank)
        return part

    def _from_stage(self, rule: Rule, tensor: Tensor) -> Tensor:
        if self.groups.pipeline.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.groups.pipeline, group_src=self.holders[rule.parameter].stage)
        return tensor
