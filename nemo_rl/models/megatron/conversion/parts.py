"""Describe the location of a Megatron Core parameter's values in hub tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.models.huggingface.tensor_files import Box
from nemo_rl.models.megatron.conversion.layouts import Layout, Stacked


@dataclass(frozen=True)
class Part:
    """Location of a parameter's rows in a hub tensor."""

    name: str
    """Name of the hub tensor."""
    expert: int | None = None
    """Index on the tensor's first dimension, if it holds all experts of a layer; else None."""
    share: tuple[int, int] = (0, 1)
    """`(i, n)`: share i of n equal shares of the rows, if one tensor holds gate and up."""
    interleaved: bool = False
    """Share i has the rows i, i + n, ... instead of adjacent rows."""
    transposed: bool = False
    """Rows of the parameter are columns of the tensor."""

    def read(self, read: Callable[[Box], Tensor], tensor_shape: Sequence[int], rows: slice, columns: slice) -> Tensor:
        """Read some rows of the part, and if it has two dimensions some columns of them.

        Args:
            read: reads a box of the hub tensor.
            tensor_shape: shape of the hub tensor.
            rows: rows of the part.
            columns: columns of the part.
        """
        index, of = self.share
        values = read(self.box(tensor_shape, rows, columns))
        values = values if self.expert is None else values[0]
        values = values.t() if self.transposed else values
        return values[index::of] if self.interleaved else values

    def box(self, tensor_shape: Sequence[int], rows: slice, columns: slice) -> Box:
        """Return the smallest box of the hub tensor that contains some rows and columns of the part."""
        index, of = self.share
        first = 0 if self.interleaved else index * self.shape_in(tensor_shape)[0]
        step = of if self.interleaved else 1
        along_rows = slice(first + rows.start * step, first + rows.stop * step)
        box: Box = (along_rows, columns)[: len(self.shape_in(tensor_shape))]
        box = box[::-1] if self.transposed else box
        return box if self.expert is None else (slice(self.expert, self.expert + 1), *box)

    def in_tensor(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of a `box`, from those of the part; of interleaved shares, from the same rows of each."""
        rows = torch.stack(list(values), dim=1).flatten(0, 1) if self.interleaved else values[0]
        rows = rows.t() if self.transposed else rows
        return rows if self.expert is None else rows[None]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole hub tensor, as a view."""
        tensor = tensor if self.expert is None else tensor[self.expert]
        tensor = tensor.t() if self.transposed else tensor
        index, of = self.share
        return tensor[index::of] if self.interleaved else tensor.chunk(of)[index]

    def shape_in(self, tensor_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part in a hub tensor of the given shape."""
        shape = tuple(tensor_shape) if self.expert is None else tuple(tensor_shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return (shape[0] // self.share[1], *shape[1:])

    def tensor_shape(self, part_shape: Sequence[int], num_experts: int | None) -> tuple[int, ...]:
        """Return the shape of the hub tensor whose part has the given shape."""
        shape = (part_shape[0] * self.share[1], *part_shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.expert is None or num_experts is None else (num_experts, *shape)


@dataclass(frozen=True)
class Rule:
    """One undivided parameter, or buffer, of the whole model, with all layers and experts."""

    parameter: str
    """Name with global numbers of layers and experts."""
    parts: tuple[Part, ...]
    """Locations of its values in hub tensors."""
    layout: Layout = Stacked()
    """Order of the parts' rows in the parameter."""
    dim: int | None = None
    """Dimension that tensor parallelism divides; None keeps the parameter whole on every rank."""
    expert: int | None = None
    """Number of its expert, which expert and expert-tensor parallelism divide; None outside of experts."""
    stacked_parts: tuple[Part, ...] = ()
    """The parts in files whose tensors hold all experts of a layer."""
    full_precision: bool = False
    """The parameter keeps its dtype when weights are sent in another one."""
    copy_of_tied: bool = False
    """The parameter is the copy of a tied one on the last pipeline stage; it is not exported."""

    def part_shapes(self, shard_shape: Sequence[int], num_shards: int) -> list[tuple[int, ...]]:
        """Return the shape of each part.

        Args:
            shard_shape: shape of one of the parameter's shards.
            num_shards: number of shards.
        """
        shape = [size * num_shards if dim == self.dim else size for dim, size in enumerate(shard_shape)]
        return [(rows, *shape[1:]) for rows in self.layout.part_rows(shape[0])]

    def joined(self, index: int, shards: Sequence[Tensor]) -> Tensor:
        """Join a part from its rows in each shard; a view if one shard holds all rows together.

        Args:
            index: index of the part.
            shards: all shards of a parameter that is divided along its rows, or the whole parameter.
        """
        found: list[tuple[int, Tensor]] = []
        for shard, values in enumerate(shards):
            at = 0
            for segment in self.layout.segments(len(values), shard, len(shards)):
                if segment.part == index:
                    found.append((segment.start, values[at : at + segment.num_rows]))
                at += segment.num_rows
        rows = [values for _, values in sorted(found, key=lambda piece: piece[0])]
        return rows[0] if len(rows) == 1 else torch.cat(rows)
