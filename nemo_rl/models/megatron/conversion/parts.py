"""Where in the hub's tensors the values of a parameter of Megatron Core lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.models.huggingface.tensor_files import Box
from nemo_rl.models.megatron.conversion.layouts import Layout, Stacked


@dataclass(frozen=True)
class Part:
    """Where the rows of a parameter lie in a tensor of the hub.

    Attributes:
        name: of the hub tensor.
        expert: index on its first dimension, where it holds all experts of a layer.
        share: `(i, n)`: share i of n equal ones of its rows, where one tensor holds gate and up.
        interleaved: the rows of the shares take turns (i, i + n, ...) instead of following each other.
        transposed: rows of the parameter are columns of the tensor.
    """

    name: str
    expert: int | None = None
    share: tuple[int, int] = (0, 1)
    interleaved: bool = False
    transposed: bool = False

    def read(self, read: Callable[[Box], Tensor], tensor_shape: Sequence[int], rows: slice, columns: slice) -> Tensor:
        """Some rows of the part, and some columns of them if it has two dimensions.

        Args:
            read: a box of the hub tensor.
            tensor_shape: of the hub tensor.
            rows: of the part.
            columns: of the part.
        """
        index, of = self.share
        first = 0 if self.interleaved else index * self.shape_in(tensor_shape)[0]
        step = of if self.interleaved else 1
        along_rows = slice(first + rows.start * step, first + rows.stop * step)
        box: Box = (along_rows, columns)[: len(self.shape_in(tensor_shape))]
        box = box[::-1] if self.transposed else box
        if self.expert is not None:
            box = (slice(self.expert, self.expert + 1), *box)
        values = read(box)
        values = values if self.expert is None else values[0]
        values = values.t() if self.transposed else values
        return values[index::of] if self.interleaved else values

    def of(self, tensor: Tensor) -> Tensor:
        """The part in a whole hub tensor; a view."""
        tensor = tensor if self.expert is None else tensor[self.expert]
        tensor = tensor.t() if self.transposed else tensor
        index, of = self.share
        return tensor[index::of] if self.interleaved else tensor.chunk(of)[index]

    def shape_in(self, tensor_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part in a hub tensor of that shape."""
        shape = tuple(tensor_shape) if self.expert is None else tuple(tensor_shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return (shape[0] // self.share[1], *shape[1:])

    def tensor_shape(self, part_shape: Sequence[int], num_experts: int | None) -> tuple[int, ...]:
        """Shape of the hub tensor that has a part of that shape."""
        shape = (part_shape[0] * self.share[1], *part_shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.expert is None or num_experts is None else (num_experts, *shape)


@dataclass(frozen=True)
class Rule:
    """One parameter, or buffer, of the whole model: all layers, all experts, not divided.

    Attributes:
        parameter: its name, with global numbers of layers and experts.
        parts: hub tensors that it is made of.
        layout: how.
        dim: along which tensor parallelism divides it; None keeps it whole on every rank.
        expert: number of the expert that it belongs to; expert and expert-tensor parallelism divide it.
        stacked_parts: where the same lies in files whose tensors hold all experts of a layer.
        full_precision: it stays in its own number format whatever format the weights are sent in.
        copy_of_tied: it holds another parameter's tensor, on the last pipeline stage only; not exported.
    """

    parameter: str
    parts: tuple[Part, ...]
    layout: Layout = Stacked()
    dim: int | None = None
    expert: int | None = None
    stacked_parts: tuple[Part, ...] = ()
    full_precision: bool = False
    copy_of_tied: bool = False

    def part_shapes(self, shard_shape: Sequence[int], num_shards: int) -> list[tuple[int, ...]]:
        """Shape of each part.

        Args:
            shard_shape: of one of the parameter's shards.
            num_shards: how many there are.
        """
        shape = [size * num_shards if dim == self.dim else size for dim, size in enumerate(shard_shape)]
        return [(rows, *shape[1:]) for rows in self.layout.part_rows(shape[0])]

    def joined(self, index: int, shards: Sequence[Tensor]) -> Tensor:
        """A part, from the rows that each shard holds of it; a view where one shard holds them together.

        Args:
            index: of the part.
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
