"""Find the parameters of this rank, and describe and read them as blocks of hub tensors.

Weights are not gathered. A shard of a parameter consists of blocks of hub tensors (rows of query, key and value heads,
of gate and up, or of an expert in a stack). The rules and their layouts define the locations of these blocks.

Invariant: all ranks together hold exactly the parameters that the rules describe; otherwise all ranks raise an error.
The blocks of all shards of a parameter cover its hub tensors once, and hub tensors have the order of the rules on all
ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.distributed.ranks.tensor_block import TensorBlock
from nemo_rl.models.megatron.conversion.parts import Part, Rule, global_name
from nemo_rl.models.megatron.conversion.rules import Rules, rules_for
from nemo_rl.models.megatron.conversion.sources import listed
from nemo_rl.models.megatron.model.build import unwrap
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.weight_sync.parts import Held, Readable, SharedReads, dtype_name


@dataclass(frozen=True)
class Groups:
    """Process groups that divide a model."""

    tensor: dist.ProcessGroup
    """Ranks that divide dense layers."""
    expert_tensor: dist.ProcessGroup
    """Ranks that divide a single expert."""
    expert: dist.ProcessGroup
    """Ranks that divide the experts of a layer."""
    pipeline: dist.ProcessGroup
    """Ranks that hold the stages of the model."""

    @classmethod
    def current(cls) -> "Groups":
        """Return the groups of Megatron Core's parallel state."""
        return cls(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )

    def dividing(self, rule: Rule) -> dist.ProcessGroup:
        """Return the group whose ranks divide a parameter's rows or columns. None if it is not divided."""
        return self.tensor if rule.expert is None else self.expert_tensor

    def num_shards(self, rule: Rule) -> int:
        """Return the number of shards of a parameter."""
        return 1 if rule.dim is None else self.dividing(rule).size()


@dataclass(frozen=True)
class Holder:
    """Shape and location of a parameter."""

    shape: tuple[int, ...]
    """Shape of each shard of the parameter."""
    dtype: torch.dtype
    """Dtype of the parameter."""
    stage: int
    """Rank in the pipeline group that holds the parameter."""
    expert_rank: int
    """Rank in the expert group that holds the parameter; parameters outside of experts are on all of its ranks."""


def num_mtp_layers(chunks: Sequence[nn.Module]) -> int:
    """Return the number of multi-token-prediction layers of the whole model. A repeated layer is counted once."""
    config = unwrap(chunks[0]).config
    return min(config.mtp_num_layers or 0, 1) if config.mtp_use_repeated_layer else config.mtp_num_layers or 0


def held_here(chunks: Sequence[nn.Module], rules: Rules, groups: Groups) -> dict[str, Tensor]:
    """Return this rank's shards by name in the whole model, including parameters without a rule."""
    experts = {rule.expert for rule in rules.by_parameter.values() if rule.expert is not None}
    first_expert = groups.expert.rank() * (len(experts) // groups.expert.size())
    held: dict[str, Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            held[global_name(name, layers, first_expert)] = parameter
        for name, buffer in model.named_buffers():
            if (known := global_name(name, layers, first_expert)) in rules.by_parameter:
                held[known] = buffer
    return held


def holders(held: Mapping[str, Tensor], rules: Rules, groups: Groups) -> dict[str, Holder]:
    """Return the location of each parameter of the model. The call is collective over pipeline and expert groups.

    Raises:
        CheckpointError: a parameter has no rule, or a rule has no parameter.
    """
    place = (groups.pipeline.rank(), groups.expert.rank())
    found = {name: Holder(tuple(tensor.shape), tensor.dtype, *place) for name, tensor in held.items()}
    for group in (groups.pipeline, groups.expert):
        parts: list[dict[str, Holder]] = [{} for _ in range(group.size())]
        dist.all_gather_object(parts, found, group=group)
        found = {name: holder for part in parts for name, holder in part.items()}
    unknown = found.keys() - rules.by_parameter.keys()
    absent = {name for name, rule in rules.by_parameter.items() if not rule.copy_of_tied} - found.keys()
    if unknown or absent:
        raise CheckpointError(
            "The Megatron Core model is not the one that its Hugging Face configuration describes."
            + listed(" Parameters that have no Hugging Face name: ", unknown)
            + listed(" Parameters that it lacks: ", absent)
        )
    return found


def held_hf_weights(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    has_scalar_head: bool = False,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[Readable]:
    """Yield every weight and persistent buffer of which this rank holds a part. Tied weights occur once.

    The iterator is collective over all ranks of a model. Reading a weight is collective if `value` is. Parameters of
    adapters are skipped, because the hub's model does not have them.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        device: device to which the values are moved.
        dtype: dtype of the values; if None, the dtype of the parameters. Correction biases of routers stay in float32,
            as in engines.
        has_scalar_head: whether the output layer is a reward model's scalar head.
        value: function from this rank's shard of a parameter to the tensor to export.

    Raises:
        CheckpointError: the model has parameters that the configuration does not describe, or lacks parameters.
    """
    rules = rules_for(hf_config, has_scalar_head=has_scalar_head, num_mtp_layers=num_mtp_layers(chunks))
    groups = Groups.current()
    held = held_here(chunks, rules, groups)
    weights = {name: tensor for name, tensor in held.items() if not name.endswith(ADAPTER_PARAMETERS)}
    yield from held_tensors(weights, rules, groups, device=device, dtype=dtype, value=value)


def held_tensors(
    held: Mapping[str, Tensor],
    rules: Rules,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[Readable]:
    """Yield the hub tensors of the parameters that the rules describe.

    `device`, `dtype` and `value` are arguments of `held_hf_weights`.

    Args:
        held: this rank's shards, by their names in the whole model.
        groups: process groups of the mesh.
    """
    holders(held, rules, groups)
    for number, bundle in enumerate(rules.bundles()):
        found: dict[str, list[_Block]] = {}
        shards = []
        for rule in bundle:
            if rule.parameter in held:
                shard = _Shard(rule, held[rule.parameter], groups)
                shards.append(shard)
                for block in shard.blocks(len(bundle)):
                    found.setdefault(block.name, []).append(block)
        if not shards:
            continue
        rule, tensor = shards[0].rule, shards[0].tensor
        exported = tensor.dtype if dtype is None or rule.full_precision else dtype
        read = partial(_values, value=value, device=device, dtype=exported)
        once = SharedReads(read, sum(map(len, found.values())))
        names = list(dict.fromkeys(part.name for part in rule.parts))
        for name, blocks in found.items():
            places = tuple(block.place for block in blocks)
            order = (number, names.index(name))
            described = Held(name, dtype_name(exported), blocks[0].tensor_shape, order, places)
            yield Readable(described, partial(_read, blocks, once))


@dataclass(frozen=True)
class _Block:
    """A block of a hub tensor."""

    name: str
    """Name of the hub tensor."""
    tensor_shape: tuple[int, ...]
    place: TensorBlock
    """Location of the block in the hub tensor."""
    part: Part
    """The part of the parameter with the values of the block."""
    tensor: Tensor
    """The shard with the values."""
    rows: tuple[slice, ...]
    """Rows of the shard that form the block. Interleaved parts have one slice each."""


@dataclass(frozen=True)
class _Shard:
    """This rank's shard of a parameter."""

    rule: Rule
    tensor: Tensor
    groups: Groups

    def blocks(self, num_experts: int) -> Iterator[_Block]:
        """Yield the blocks of hub tensors in the shard. `num_experts` is the number of experts in a stacked tensor."""
        rule, shape = self.rule, tuple(self.tensor.shape)
        num_shards = self.groups.num_shards(rule)
        number = self.groups.dividing(rule).rank() if num_shards > 1 else 0
        shapes = rule.part_shapes(shape, num_shards)
        columns = rule.columns(shape, number)
        found: dict[tuple[str, TensorBlock], list[tuple[int, slice]]] = {}
        tensor_shapes = [part.tensor_shape(shapes[index], num_experts) for index, part in enumerate(rule.parts)]
        at = 0
        by_rows = (number, num_shards) if rule.dim == 0 else (0, 1)
        for segment in rule.layout.segments(shape[0], *by_rows):
            part, rows = rule.parts[segment.part], slice(segment.start, segment.stop)
            place = part.block(tensor_shapes[segment.part], rows, columns)
            found.setdefault((part.name, place), []).append((segment.part, slice(at, at + segment.num_rows)))
            at += segment.num_rows
        for (name, place), rows_of in found.items():
            index = rows_of[0][0]
            rows_in_order = tuple(rows for _, rows in sorted(rows_of, key=lambda item: item[0]))
            yield _Block(name, tensor_shapes[index], place, rule.parts[index], self.tensor, rows_in_order)


def _values(shard: Tensor, value: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    return value(shard).to(device, dtype)


def _read(blocks: Sequence[_Block], values: SharedReads[Tensor]) -> list[Tensor]:
    found = []
    for block in blocks:
        shard = values.of(block.tensor)
        found.append(block.part.in_tensor([shard[rows] for rows in block.rows]))
    return found
