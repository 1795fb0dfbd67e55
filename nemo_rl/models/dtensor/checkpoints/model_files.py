"""Write and read a policy's weights.

Layout (W = weights folder), written by all ranks together:

    W/model/model-*.safetensors, model.safetensors.index.json, config.json   names and shapes as on the hub

Invariant: a load restores every bit that a save wrote, on any number of ranks. If one rank cannot write, all ranks
raise, so that training can continue. Folders are on storage that every rank sees; the caller makes writing atomic.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.models.dtensor.checkpoints.weight_files import (
    Part,
    Piece,
    join_pieces,
    local_box,
    parts_of_this_rank,
    write_parts,
)
from nemo_rl.models.dtensor.pipeline.stages import stage_of
from nemo_rl.models.dtensor.pipeline.weights import names_here, without_copies
from nemo_rl.models.huggingface.checkpoint_names import Group, groups_in_memory, in_checkpoint
from nemo_rl.models.huggingface.folders import MODEL_FOLDER, TENSOR_FILES
from nemo_rl.models.huggingface.tensor_files import MAX_FILE_BYTES, TensorFiles, file_names, write_index
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError


def weights_by_name(hf: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by the model's own names, tied ones once; not copied.

    A pipeline stage returns those that it holds, tied ones under the name that the whole model has for them.
    """
    persistent = hf.state_dict(keep_vars=True)
    named = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    for name, buffer in hf.named_buffers():
        if name in persistent:
            named[name] = buffer.detach()
    stage = stage_of(hf)
    return named if stage is None else {stage.known_as(name): tensor for name, tensor in named.items()}


def prepare_weights(
    hf: PreTrainedModel,
    weights_path: Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare to write weights and configuration as a folder that `from_pretrained` and engines load.

    Args:
        hf: the model, sharded or not.
        weights_path: the W of the module docstring.
        weights: tensors to write, by the model's names; None takes `weights_by_name`.
        keep: applied to every tensor that will be written.

    Returns:
        A function that writes the folder; raises a CheckpointError on all ranks if one of them cannot write its files.
    """
    held = weights_by_name(hf)
    leaving = without_copies(hf, held.items() if weights is None else weights)
    parts = parts_of_this_rank(in_checkpoint(hf, leaving), held)
    if keep is not as_it_is:
        parts = iter([replace(part, values=keep(f"weights.{part.name}", part.values)) for part in parts])
    return partial(_write_weights, hf, weights_path / MODEL_FOLDER, parts)


def _write_weights(
    hf: PreTrainedModel, folder: Path, parts: Iterator[Part], group: dist.ProcessGroup | None = None
) -> None:
    rank, num_ranks, sharded = dist.get_rank(), dist.get_world_size(), folder / "sharded"
    mine: list[Piece] = []
    with raise_on_all_ranks(group):
        mine = write_parts(sharded / f"rank_{rank:05d}", parts)
    gathered: list[list[Piece]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(gathered, mine, group=group)
    pieces: dict[str, list[Piece]] = {}
    for piece in chain.from_iterable(gathered):
        pieces.setdefault(piece.name, []).append(piece)
    file_of = file_names({name: found[0].num_bytes for name, found in pieces.items()}, MAX_FILE_BYTES)
    with raise_on_all_ranks(group):
        for file in sorted(set(file_of.values()))[rank::num_ranks]:
            join_pieces(folder / file, {name: found for name, found in pieces.items() if file_of[name] == file})
    with raise_on_all_ranks(group):
        if rank == 0:
            shutil.rmtree(sharded)
            write_index(folder, file_of, sum(found[0].num_bytes for found in pieces.values()))
            hf.config.architectures = [type(hf).__name__]
            hf.config.save_pretrained(folder)
            if hf.can_generate() and hf.generation_config is not None:
                hf.generation_config.save_pretrained(folder)


def load_weights(hf: PreTrainedModel, weights_path: Path) -> None:
    """Read weights into the model in place; each rank reads its own part.

    Raises:
        CheckpointError: the folder has no weights, or they do not fit this model.
    """
    folder = weights_path / MODEL_FOLDER
    read, stage = read_weights(hf, saved_weights(folder), strict=True), stage_of(hf)
    missing = weights_by_name(hf).keys() - (read if stage is None else map(stage.known_as, read))
    if missing:
        raise CheckpointError(f"{folder} does not fit {type(hf).__name__}: it lacks {', '.join(sorted(missing)[:5])}.")


def saved_weights(folder: Path) -> TensorFiles:
    """Open the tensors of a model folder.

    Raises:
        CheckpointError: the folder has no tensors, or a file is damaged.
    """
    files = sorted(folder.glob(TENSOR_FILES))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors files: not a policy checkpoint.")
    return TensorFiles(files)


@torch.no_grad()
def read_weights(hf: PreTrainedModel, tensors: TensorFiles, *, strict: bool = False) -> set[str]:
    """Read weights from files into the model in place, in the model's dtype; each rank reads its own part.

    Only the rank's part of a tensor is read if it needs no conversion. Tensors that are converted together are in
    memory together, one group at a time.

    Args:
        hf: the model, sharded or not.
        tensors: names and shapes as on the hub.
        strict: raise an error for a tensor that belongs to no weight of the model.

    Returns:
        Names of the weights that the files hold, each under its first name.

    Raises:
        CheckpointError: a tensor does not fit the model.
    """
    weights, stage = hf.state_dict(keep_vars=True), stage_of(hf)
    weights |= {known: weights[name] for known, name in names_here(hf).items()}
    name_of = {id(tensor): name for name, tensor in (*hf.named_parameters(), *hf.named_buffers())}
    found: set[str] = set()
    for group in groups_in_memory(hf, tensors):
        shapes = {name: tensors.like(name) for name in group.sources}
        wanted: dict[str, Tensor] = {}
        for name, like in group.convert(hf, shapes).items():
            weight = weights.get(name)
            if weight is None and (not strict or (stage is not None and name in stage.elsewhere)):
                continue
            if weight is None or weight.shape != like.shape:
                mine = "it has no such weight" if weight is None else f"of shape {tuple(weight.shape)}"
                file = tensors.file_of[next(iter(group.sources))]
                raise CheckpointError(
                    f"{file} does not fit {type(hf).__name__}: {name} has shape {tuple(like.shape)}, {mine}."
                )
            found.add(name_of[id(weight)])
            if held_here(weight).numel() > 0:
                wanted[name] = weight
        _read_group(hf, group, tensors, wanted)
    return found


def _read_group(hf: PreTrainedModel, group: Group, tensors: TensorFiles, wanted: dict[str, Tensor]) -> None:
    """Read a group of tensors into the weights made from it, as far as this rank holds them."""
    if group.converter is None:
        (source,) = group.sources
        for weight in wanted.values():
            held_here(weight).copy_(tensors.read(source, local_box(weight)))
    elif wanted:
        converted = group.convert(hf, {name: tensors.read(name) for name in group.sources})
        for name, weight in wanted.items():
            fill(weight, converted[name])


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter."""
    held_here(parameter).copy_(local_part(value, parameter))


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of `like`; the whole tensor if `like` is not sharded."""
    return value[local_box(like)]
