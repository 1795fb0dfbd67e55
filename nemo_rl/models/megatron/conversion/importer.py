"""Load a Megatron Core model from a folder of Hugging Face safetensors files.

Each rank reads the rows and columns that it holds directly into its parameters, without a conversion beforehand and
without a copy of the model. Invariant: afterwards every parameter has the files' values, and every tensor of the files
belongs to a parameter or is left out by a rule.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.models.huggingface.tensor_files import Box, TensorFiles, indexed_files, weight_files
from nemo_rl.models.megatron.conversion.dequantized import DequantizedFiles
from nemo_rl.models.megatron.conversion.holdings import Groups, held_here, holders, num_mtp_layers
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import rules_for
from nemo_rl.models.megatron.conversion.sources import sources
from nemo_rl.utils.errors import CheckpointError


class TensorSource(Protocol):
    """Hub tensors by name, such as `TensorFiles`."""

    def like(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype."""

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return the tensor's values in a box."""


def load_huggingface(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, folder: Path, *, has_scalar_head: bool = False
) -> None:
    """Fill every parameter of this rank's chunks; collective over pipeline and experts.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        hf_config: Hugging Face configuration of the model in the folder.
        folder: folder with safetensors files.
        has_scalar_head: whether the output layer is a scalar head; it keeps its values if the files have none for it.

    Raises:
        CheckpointError: the folder has no such files, or names or shapes of their tensors do not fit the model.
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
    """Read this rank's shard of a parameter."""
    keep_precision(tensor, rule)
    require_shapes(tensor, rule, parts, files, groups.num_shards(rule))
    fill(tensor, rule, dict(enumerate(parts)), files, groups)


def keep_precision(tensor: Tensor, rule: Rule) -> None:
    """Convert a parameter to float32 if its rule requires full precision."""
    if rule.full_precision and tensor.dtype != torch.float32:
        tensor.data = tensor.data.float()


@torch.no_grad()
def fill(tensor: Tensor, rule: Rule, parts: Mapping[int, Part], source: TensorSource, groups: Groups) -> None:
    """Copy parts of a parameter into this rank's shard of it.

    Args:
        tensor: the shard.
        rule: rule of the parameter.
        parts: parts to copy, by their numbers in the rule.
        source: source of their tensors.
        groups: process groups of the mesh.
    """
    num_shards = groups.num_shards(rule)
    shard = groups.dividing(rule).rank() if num_shards > 1 else 0
    columns = slice(None)
    if rule.dim == 1:
        columns = slice(shard * tensor.shape[1], (shard + 1) * tensor.shape[1])
        shard, num_shards = 0, 1
    start = 0
    for segment in rule.layout.segments(len(tensor), shard, num_shards):
        part = parts.get(segment.part)
        if part is not None:
            read, shape = partial(source.read, part.name), source.like(part.name).shape
            values = part.read(read, shape, slice(segment.start, segment.stop), columns)
            tensor[start : start + segment.num_rows].copy_(values)
        start += segment.num_rows


def require_shapes(tensor: Tensor, rule: Rule, parts: tuple[Part, ...], files: TensorFiles, num_shards: int) -> None:
    """Refuse a file whose tensors have other shapes than the model.

    Raises:
        CheckpointError: a shape differs; the message names the tensor.
    """
    for part, shape in zip(parts, rule.part_shapes(tensor.shape, num_shards), strict=True):
        stored = tuple(files.like(part.name).shape)
        if part.shape_in(stored) != shape:
            raise CheckpointError(
                f"{files.file_of[part.name]}: {part.name} has shape {stored}, but {rule.parameter} needs {shape} of it."
            )
