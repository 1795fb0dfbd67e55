"""Write and read a policy's weights.

All ranks together write this layout (W = weights folder):

    W/model/model-*.safetensors, model.safetensors.index.json, config.json   names and shapes as on the hub

Invariant: a load restores every bit that a save wrote, on any number of ranks. If one rank cannot write, all raise, so
that none waits for another and training can continue. All ranks must see the folders. The caller makes writing atomic.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.distributed.ranks.tensor_block import TensorBlock, block_here
from nemo_rl.files.regular_file import open_regular
from nemo_rl.files.trusted_code import copy_code
from nemo_rl.models.dtensor.pipeline.stages import names_here, stage_of, without_copies
from nemo_rl.models.huggingface.checkpoint_names import TensorGroup, groups_in_memory, in_checkpoint
from nemo_rl.models.huggingface.folders import MODEL_FOLDER, TENSOR_FILES
from nemo_rl.models.huggingface.tensor_files import (
    MAX_FILE_BYTES,
    TensorFiles,
    file_names,
    header_bytes,
    raw_bytes,
    write_index,
)
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError


@dataclass(frozen=True)
class BlockToWrite:
    """The block of a tensor that a rank writes."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    block: TensorBlock
    values: Tensor
    """The values of the block, on any device."""


@dataclass(frozen=True)
class WrittenBlock:
    """Location of a written block."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: TensorBlock
    file: Path
    """File of the rank that wrote the block."""
    start: int
    """First byte of the block in the file."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parts_of_this_rank(weights: Iterable[tuple[str, Tensor]], names_here: Iterable[str]) -> Iterator[BlockToWrite]:
    """Yield the blocks of weights that this rank writes. The call is collective before the first block.

    Each shard is written by one rank. If several ranks hold the same whole tensors, each rank writes some of them.

    Args:
        weights: every weight of this rank's layers, in the same order on all ranks that hold the same layers.
        names_here: names of the model's weights on this rank, which identify the ranks that hold the same layers.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sha256("\n".join(names_here).encode()).hexdigest())
    peers = [rank for rank, names in enumerate(found) if names == found[dist.get_rank()]]
    for index, (name, tensor) in enumerate(weights):
        if isinstance(tensor, DTensor):
            values, mine = tensor.to_local(), _writes(tensor)
        else:
            values, mine = tensor, peers[index % len(peers)] == dist.get_rank()
        if mine:
            yield BlockToWrite(name, tuple(tensor.shape), block_here(tensor), values)


def _writes(tensor: DTensor) -> bool:
    """Return whether this rank writes its shard. The first rank with a shard writes it, unless the shard is empty."""
    coordinate = tensor.device_mesh.get_coordinate()
    placed = zip(coordinate, tensor.placements, strict=True) if coordinate is not None else ()
    first = all(index == 0 for index, placement in placed if placement.is_replicate())
    return first and coordinate is not None and tensor.to_local().numel() > 0


def write_parts(file: Path, parts: Iterable[BlockToWrite]) -> list[WrittenBlock]:
    """Append parts to a file, in the order of the iterator.

    The iterator is exhausted even if a part cannot be written, because other ranks take part in its collective calls.

    Raises:
        OSError: a part could not be written.
    """
    pieces: list[WrittenBlock] = []
    end, trouble = 0, None
    for part in parts:
        if trouble is None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab" if end else "wb") as stream:
                    written = stream.write(raw_bytes(part.values.detach().to("cpu").contiguous()))
            except OSError as error:
                trouble = error
            else:
                pieces.append(WrittenBlock(part.name, part.shape, part.values.dtype, part.block, file, end))
                end += written
    if trouble is not None:
        raise trouble
    return pieces


def join_pieces(target: Path, pieces_of: dict[str, list[WrittenBlock]]) -> None:
    """Write a safetensors file from the pieces of its tensors. Memory holds one whole tensor at a time.

    Raises:
        OSError: a piece cannot be read, or the file cannot be written.
        RuntimeError: a piece of a tensor is missing.
    """
    with target.open("wb") as stream:
        stream.write(header_bytes({name: (pieces[0].dtype, pieces[0].shape) for name, pieces in pieces_of.items()}))
        for pieces in pieces_of.values():
            stream.write(raw_bytes(_whole(pieces)))


def _whole(pieces: list[WrittenBlock]) -> Tensor:
    whole = torch.empty(pieces[0].shape, dtype=pieces[0].dtype)
    filled = 0
    for piece in pieces:
        part = piece.block.of(whole)
        contiguous = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
        with open_regular(piece.file) as stream:
            stream.seek(piece.start)
            if stream.readinto(raw_bytes(contiguous)) != contiguous.nbytes:
                raise OSError(f"{piece.file} ends before the whole part of {piece.name} is read")
        if contiguous is not part:
            part.copy_(contiguous)
        filled += part.numel()
    if filled != whole.numel():
        raise RuntimeError(f"{filled} of {whole.numel()} elements of {pieces[0].name} were written")
    return whole


def weights_by_name(hf: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by the model's own names, without copying. Tied weights occur once.

    A pipeline stage returns its own tensors. A tied weight has its name in the whole model.
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
    """Prepare to write weights and configuration as a folder for `from_pretrained` and engines.

    Args:
        hf: the model, sharded or not.
        weights_path: the folder W of the module docstring.
        weights: tensors to write, by the model's names; if None, `weights_by_name`.
        keep: applied to every tensor that will be written.

    Returns:
        A function that writes the folder. It raises a CheckpointError on all ranks if a rank cannot write its files.
    """
    held = weights_by_name(hf)
    leaving = without_copies(hf, held.items() if weights is None else weights)
    parts = parts_of_this_rank(in_checkpoint(hf, leaving), held)
    if keep is not as_it_is:
        parts = iter([replace(part, values=keep(f"weights.{part.name}", part.values)) for part in parts])
    return partial(_write_weights, hf, weights_path / MODEL_FOLDER, parts)


def _write_weights(
    hf: PreTrainedModel, folder: Path, parts: Iterator[BlockToWrite], group: dist.ProcessGroup | None = None
) -> None:
    rank, num_ranks, sharded = dist.get_rank(), dist.get_world_size(), folder / "sharded"
    mine: list[WrittenBlock] = []
    with raise_on_all_ranks(group):
        mine = write_parts(sharded / f"rank_{rank:05d}", parts)
    gathered: list[list[WrittenBlock]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(gathered, mine, group=group)
    pieces: dict[str, list[WrittenBlock]] = {}
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
            copy_code(str(hf.config.name_or_path), folder)
            if hf.can_generate() and hf.generation_config is not None:
                hf.generation_config.save_pretrained(folder)


def load_weights(hf: PreTrainedModel, weights_path: Path) -> None:
    """Read this rank's part of the weights into the model in place.

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
    """Read this rank's part of the weights from files into the model, in place and in the model's dtype.

    Only the rank's part of a tensor is read if it needs no conversion. Tensors that are converted together are in
    memory together, one group at a time.

    Args:
        hf: the model, sharded or not.
        tensors: names and shapes as on the hub.
        strict: raise an error for a tensor that belongs to no weight of the model.

    Returns:
        Names of the weights in the files. A tied weight has its first name in the model.

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


def _read_group(hf: PreTrainedModel, group: TensorGroup, tensors: TensorFiles, wanted: dict[str, Tensor]) -> None:
    """Read a group of tensors, and write this rank's parts of the weights made from it."""
    if group.converter is None:
        (source,) = group.sources
        for weight in wanted.values():
            held_here(weight).copy_(tensors.read(source, block_here(weight)))
    elif wanted:
        converted = group.convert(hf, {name: tensors.read(name) for name in group.sources})
        for name, weight in wanted.items():
            held_here(weight).copy_(block_here(weight).of(converted[name]))
