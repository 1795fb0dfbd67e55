"""Give the parts of a Megatron Core model their values from a folder of Hugging Face's safetensors files.

Each rank reads the rows and columns that it holds, straight into its parameters: nothing is converted beforehand, and
no copy of the model is kept anywhere. Invariant: afterwards every parameter has the files' values, and every tensor of
the files was some parameter's or was named as left out.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.models.huggingface.tensor_files import TensorFiles, weight_files
from nemo_rl.models.megatron.conversion.holdings import Groups, held_here, holders, listed
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import EMBEDDING, HEAD, Rules, rules_for
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)


def load_huggingface(chunks: Sequence[nn.Module], hf_config: PretrainedConfig, folder: Path) -> None:
    """Fill every parameter of this rank's chunks; collective over pipeline and experts.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        hf_config: of the model in the folder.
        folder: holds safetensors files.

    Raises:
        CheckpointError: the folder holds no such files, or the tensors in them are not the model's, by name or shape.
    """
    rules, groups = rules_for(hf_config), Groups.current()
    files = TensorFiles(weight_files(folder))
    held = held_here(chunks, rules, groups)
    holders(held, rules, groups)
    sources = _sources(rules, files, folder)
    for name, tensor in held.items():
        _fill(tensor, rules.by_parameter[name], sources[name], files, groups)


def _sources(rules: Rules, files: TensorFiles, folder: Path) -> dict[str, tuple[Part, ...]]:
    """Where each parameter lies in these files.

    Raises:
        CheckpointError: a tensor is missing, unknown or quantised.
    """
    names = set(files)
    left_out = {*rules.derived(names), *(heads := rules.further_heads(names))}
    if rules.is_tied and HEAD in names:
        _require_tied(files)
        left_out.add(HEAD)
    sources = {name: _stored_parts(rule, names) for name, rule in rules.by_parameter.items()}
    wanted = {part.name for parts in sources.values() for part in parts}
    missing, unknown = wanted - names, names - wanted - left_out
    if missing or unknown:
        raise CheckpointError(
            f"The files in {str(folder)!r} are not those of the model that their configuration describes."
            + listed(" Tensors that they lack: ", missing)
            + listed(" Tensors that belong to no parameter: ", unknown)
        )
    if heads and dist.get_rank() == 0:
        logger.warning(
            "%d tensors of layers that predict further tokens (multi-token prediction) are left out: they are neither "
            "trained nor exported. The first is %s.",
            len(heads),
            min(heads),
        )
    return sources


def _stored_parts(rule: Rule, names: set[str]) -> tuple[Part, ...]:
    """The rule's parts, or its parts of stacks where the files hold those."""
    stacked = bool(rule.stacked_parts) and all(part.name in names for part in rule.stacked_parts)
    return rule.stacked_parts if stacked else rule.parts


def _require_tied(files: TensorFiles) -> None:
    if not files.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"The configuration ties {HEAD} to {EMBEDDING}, but the files hold different values for them. Set "
            "tie_word_embeddings=false in config.json or policy.hf_config_overrides for two weights."
        )


@torch.no_grad()
def _fill(tensor: Tensor, rule: Rule, parts: tuple[Part, ...], files: TensorFiles, groups: Groups) -> None:
    """Read this rank's shard of a parameter."""
    if rule.full_precision and tensor.dtype != torch.float32:
        tensor.data = tensor.data.float()
    num_shards = groups.num_shards(rule)
    _require_shapes(tensor, rule, parts, files, num_shards)
    shard = groups.dividing(rule).rank() if num_shards > 1 else 0
    columns = slice(None)
    if rule.dim == 1:
        columns = slice(shard * tensor.shape[1], (shard + 1) * tensor.shape[1])
        shard, num_shards = 0, 1
    start = 0
    for segment in rule.layout.segments(len(tensor), shard, num_shards):
        part = parts[segment.part]
        read, shape = partial(files.read, part.name), files.like(part.name).shape
        values = part.read(read, shape, slice(segment.start, segment.stop), columns)
        tensor[start : start + segment.num_rows].copy_(values)
        start += segment.num_rows


def _require_shapes(tensor: Tensor, rule: Rule, parts: tuple[Part, ...], files: TensorFiles, num_shards: int) -> None:
    """Refuse a file whose tensors have other shapes than the model.

    Raises:
        CheckpointError: names the tensor.
    """
    for part, shape in zip(parts, rule.part_shapes(tensor.shape, num_shards), strict=True):
        stored = tuple(files.like(part.name).shape)
        if part.shape_in(stored) != shape:
            raise CheckpointError(
                f"{files.file_of[part.name]}: {part.name} has shape {stored}, but {rule.parameter} needs {shape} of it."
            )
