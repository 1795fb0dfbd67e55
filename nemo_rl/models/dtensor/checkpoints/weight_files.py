"""Write the weights of a sharded model to safetensors files; no rank holds more than one whole tensor.

Each rank first appends its parts to its own file, tensor by tensor. Then the ranks divide the safetensors files among
themselves and join the pieces of each tensor, one tensor at a time. One process writes each file, from front to back,
so any storage that all ranks see is sufficient.

Invariant: every element of every tensor is written once, by a rank that holds it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nemo_rl.files.regular_file import open_regular
from nemo_rl.models.huggingface.tensor_files import Box, header_bytes, raw_bytes


@dataclass(frozen=True)
class Part:
    """The part of a tensor that a rank writes."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """Position of the part in the whole tensor."""
    values: Tensor
    """The part, on any device."""


@dataclass(frozen=True)
class Piece:
    """Location of a part that has been written."""

    name: str
    """As in `Part`."""
    shape: tuple[int, ...]
    """As in `Part`."""
    dtype: torch.dtype
    box: Box
    """As in `Part`."""
    file: Path
    """File of the rank that wrote the part."""
    start: int
    """First byte of the part in the file."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def local_box(like: Tensor) -> Box:
    """Return the position of this rank's part in the whole tensor; empty if the part is the whole tensor."""
    if not isinstance(like, DTensor):
        return ()
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def parts_of_this_rank(weights: Iterable[tuple[str, Tensor]], names_here: Iterable[str]) -> Iterator[Part]:
    """Yield the parts that this rank writes.

    Each shard is written by one rank. Ranks that hold the same whole tensors write them in turns. Collective before
    the first part.

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
            yield Part(name, tuple(tensor.shape), local_box(tensor), values)


def _writes(tensor: DTensor) -> bool:
    """Return whether this rank is the first one that holds its shard, and the shard is not empty."""
    coordinate = tensor.device_mesh.get_coordinate()
    placed = zip(coordinate, tensor.placements, strict=True) if coordinate is not None else ()
    first = all(index == 0 for index, placement in placed if placement.is_replicate())
    return first and coordinate is not None and tensor.to_local().numel() > 0


def write_parts(file: Path, parts: Iterable[Part]) -> list[Piece]:
    """Append parts to a file, in the order of the iterator.

    The iterator is exhausted even if a part cannot be written, because other ranks take part in computing them.

    Raises:
        OSError: a part could not be written.
    """
    pieces: list[Piece] = []
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
                pieces.append(Piece(part.name, part.shape, part.values.dtype, part.box, file, end))
                end += written
    if trouble is not None:
        raise trouble
    return pieces


def join_pieces(target: Path, pieces_of: dict[str, list[Piece]]) -> None:
    """Write a safetensors file from the pieces of its tensors, with one whole tensor in memory at a time.

    Raises:
        OSError: a piece cannot be read, or the file cannot be written.
        RuntimeError: a piece of a tensor is missing.
    """
    with target.open("wb") as stream:
        stream.write(header_bytes({name: (pieces[0].dtype, pieces[0].shape) for name, pieces in pieces_of.items()}))
        for pieces in pieces_of.values():
            stream.write(raw_bytes(_whole(pieces)))


def _whole(pieces: list[Piece]) -> Tensor:
    whole = torch.empty(pieces[0].shape, dtype=pieces[0].dtype)
    filled = 0
    for piece in pieces:
        part = whole[piece.box]
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
