"""Find the parameters that this rank holds, and the ranks of its pipeline and experts that hold the others.

Invariant: the ranks hold exactly the parameters that the rules describe, or all ranks raise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from nemo_rl.models.megatron.build import unwrap
from nemo_rl.models.megatron.conversion.names import global_name
from nemo_rl.models.megatron.conversion.parts import Rule
from nemo_rl.models.megatron.conversion.rules import Rules
from nemo_rl.models.megatron.conversion.sources import listed
from nemo_rl.utils.errors import CheckpointError


@dataclass(frozen=True)
class Groups:
    """Process groups that divide a model."""

    tensor: dist.ProcessGroup
    """Divides dense layers."""
    expert_tensor: dist.ProcessGroup
    """Divides each expert."""
    expert: dist.ProcessGroup
    """Divides the experts of a layer."""
    pipeline: dist.ProcessGroup
    """Divides the layers."""

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
        """Return the ranks that divide a parameter's rows or columns, if they are divided."""
        return self.tensor if rule.expert is None else self.expert_tensor

    def num_shards(self, rule: Rule) -> int:
        """Return the number of shards of a parameter."""
        return 1 if rule.dim is None else self.dividing(rule).size()


@dataclass(frozen=True)
class Holder:
    """Location of a parameter."""

    shape: tuple[int, ...]
    """Shape of each of its shards."""
    dtype: torch.dtype
    """Dtype of the parameter."""
    stage: int
    """Rank in the pipeline group."""
    expert_rank: int
    """Rank in the expert group; parameters outside of experts are on all of its ranks."""


def num_mtp_layers(chunks: Sequence[nn.Module]) -> int:
    """Return the number of layers for multi-token prediction of the whole model; a repeated layer counts once."""
    config = unwrap(chunks[0]).config
    return min(config.mtp_num_layers or 0, 1) if config.mtp_use_repeated_layer else config.mtp_num_layers or 0


def held_here(chunks: Sequence[nn.Module], rules: Rules, groups: Groups) -> dict[str, Tensor]:
    """Return this rank's shards by their names in the whole model, including parameters without a rule."""
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
    """Locate each parameter of the model; collective over pipeline and experts.

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
