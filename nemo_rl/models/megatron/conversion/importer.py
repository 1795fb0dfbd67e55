"""Load a Megatron Core model from a folder of safetensors files or from the tensors of a weight sync.

`load_huggingface` reads files. Each rank reads its rows and columns directly into its parameters, without a previous
conversion and without a copy of the model. Invariant: afterwards every parameter has the files' values, and every
tensor of the files belongs to a parameter or is excluded by a rule.

`HubReceiver` loads the weights that are sent to an engine, one hub tensor at a time, in any order. Invariant: tensors
whose name or shape does not fit the model are refused, and missing tensors are reported by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.distributed.ranks.tensor_block import TensorBlock
from nemo_rl.models.huggingface.tensor_files import TensorFiles, indexed_files, weight_files
from nemo_rl.models.megatron.conversion.holdings import Groups, held_here, holders, num_mtp_layers
from nemo_rl.models.megatron.conversion.parts import Part, Rule, TensorSource
from nemo_rl.models.megatron.conversion.rules import rules_for
from nemo_rl.models.megatron.conversion.sources import DequantizedFiles, sources
from nemo_rl.utils.errors import CheckpointError, GenerationError


def load_huggingface(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, folder: Path, *, has_scalar_head: bool = False
) -> None:
    """Read every parameter of this rank's chunks from files. The call is collective over pipeline and expert groups.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        folder: folder with safetensors files.
        has_scalar_head: whether the output layer is a scalar head. It keeps its values if the files have none for it.

    Raises:
        CheckpointError: the folder has no safetensors files, or names or shapes of tensors do not fit the model.
    """
    rules = rules_for(hf_config, has_scalar_head=has_scalar_head, num_mtp_layers=num_mtp_layers(chunks))
    groups = Groups.current()
    files = DequantizedFiles(weight_files(folder), hf_config, indexed_files(folder))
    held = held_here(chunks, rules, groups)
    holders(held, rules, groups)
    stored = sources(rules, files, folder)
    for name in held.keys() & stored.keys():
        _load(held[name], rules.by_parameter[name], stored[name], files, groups)


def _load(tensor: Tensor, rule: Rule, parts: tuple[Part, ...], files: TensorFiles, groups: Groups) -> None:
    """Read this rank's shard of a parameter from files."""
    keep_precision(tensor, rule)
    require_shapes(tensor, rule, parts, files, groups.num_shards(rule))
    fill(tensor, rule, dict(enumerate(parts)), files, groups)


def keep_precision(tensor: Tensor, rule: Rule) -> None:
    """Convert a parameter to float32 if its rule requires this."""
    if rule.full_precision and tensor.dtype != torch.float32:
        tensor.data = tensor.data.float()


@torch.no_grad()
def fill(tensor: Tensor, rule: Rule, parts: Mapping[int, Part], source: TensorSource, groups: Groups) -> None:
    """Copy parts of a parameter to `tensor`, this rank's shard of the parameter.

    Args:
        parts: parts to copy, by their indices in the rule.
        source: hub tensors that contain the parts.
        groups: process groups of the mesh.
    """
    num_shards = groups.num_shards(rule)
    shard = groups.dividing(rule).rank() if num_shards > 1 else 0
    columns, start = rule.columns(tensor.shape, shard), 0
    by_rows = (shard, num_shards) if rule.dim == 0 else (0, 1)
    for segment in rule.layout.segments(len(tensor), *by_rows):
        part = parts.get(segment.part)
        if part is not None:
            values = part.read(source, slice(segment.start, segment.stop), columns)
            tensor[start : start + segment.num_rows].copy_(values)
        start += segment.num_rows


def require_shapes(tensor: Tensor, rule: Rule, parts: tuple[Part, ...], files: TensorFiles, num_shards: int) -> None:
    """Refuse files whose tensors do not have the shapes that a parameter needs.

    Raises:
        CheckpointError: a shape differs; the message names the tensor.
    """
    for part, shape in zip(parts, rule.part_shapes(tensor.shape, num_shards), strict=True):
        stored = tuple(files.like(part.name).shape)
        if part.shape_in(stored) != shape:
            raise CheckpointError(
                f"{files.file_of[part.name]}: {part.name} has shape {stored}, but {rule.parameter} needs {shape} of it."
            )


@dataclass(frozen=True)
class _Sent:
    """A received tensor as a `TensorSource`."""

    tensor: Tensor

    def like(self, name: str) -> Tensor:
        return self.tensor

    def read(self, name: str, block: TensorBlock | None = None) -> Tensor:
        return self.tensor if block is None else block.of(self.tensor)


class HubReceiver:
    """Receive the tensors of weight updates. The constructor is collective over pipeline and expert groups.

    Args:
        chunks: the rank's virtual stages.

    Raises:
        CheckpointError: the model has parameters that the configuration does not describe, or lacks parameters.
    """

    def __init__(self, chunks: Sequence[nn.Module], hf_config: PretrainedConfig) -> None:
        self._chunks, self._rules, self._groups = chunks, rules_for(hf_config), Groups.current()
        self._uses: dict[str, list[tuple[Rule, int, Part]]] = {}
        """Uses of each hub tensor: rule of the parameter, index of the part in the rule, and the part."""
        for rule in self._rules.by_parameter.values():
            for parts in (rule.parts, rule.stacked_parts):
                for index, part in enumerate(parts):
                    self._uses.setdefault(part.name, []).append((rule, index, part))
        self._held: dict[str, Tensor] = {}
        self._missing: dict[tuple[str, int], str] = {}
        self.begin()
        holders(self._held, self._rules, self._groups)

    def begin(self) -> None:
        """Start an update of all tensors, and look up the parameters, because moving a model replaces buffers."""
        self._held = held_here(self._chunks, self._rules, self._groups)
        self._missing = {}
        for name, uses in self._uses.items():
            for rule, index, _ in uses:
                if rule.parameter in self._held:
                    keep_precision(self._held[rule.parameter], rule)
                    self._missing.setdefault((rule.parameter, index), name)

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the parameters of this rank that use it.

        Raises:
            GenerationError: the model has no such tensor, or its shape differs.
        """
        if name not in self._uses:
            raise GenerationError(f"The engine's model has no tensor named {name}.")
        for rule, index, part in self._uses[name]:
            held = self._held.get(rule.parameter)
            if held is None:
                continue
            shape = rule.part_shapes(held.shape, self._groups.num_shards(rule))[index]
            if tensor.dim() != len(shape) + (part.expert is not None) or part.shape_in(tensor.shape) != shape:
                raise GenerationError(
                    f"{name} was sent with shape {tuple(tensor.shape)}, but {rule.parameter} needs {shape} of it."
                )
            fill(held, rule, {index: part}, _Sent(tensor), self._groups)
            self._missing.pop((rule.parameter, index), None)

    def unbound(self) -> list[str]:
        """Return the hub tensors that have not been received since `begin`."""
        return sorted(set(self._missing.values()))
