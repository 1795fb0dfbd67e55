"""Describe the location of a Megatron Core parameter's values in hub tensors, and its name in the whole model.

A parameter of Megatron Core consists of rows of one or several hub tensors, its *parts*: a gated layer has the rows of
gate and then those of up, and attention has query, key and value heads in groups. A `RowLayout` maps the rows of a
tensor-parallel shard to rows of the parts, for reading and for writing. Invariant: the segments of all shards cover
every row of every part once.

`global_name` maps the name of a parameter on one rank to its name in the whole model. Invariant: this name is the same
on every mesh, with Transformer Engine's modules and with Megatron Core's own. The module does not import megatron.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl.distributed.ranks.tensor_block import TensorBlock


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a part that are also adjacent in a shard."""

    part: int
    """Index of the part in the rule."""
    start: int
    """First row in the part."""
    stop: int
    """Row after the last one in the part."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class RowLayout(Protocol):
    """Order of the parts' rows in each shard of a parameter."""

    def part_rows(self, num_rows: int) -> list[int]:
        """Return the number of rows of each part of a parameter with `num_rows` rows in total."""

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """Yield the segments of a shard of `num_rows` rows, in order."""


@dataclass(frozen=True)
class Stacked:
    """Layout of equal-sized parts, where each shard has its share of the first part, then of the second, and so on."""

    num_parts: int = 1
    """Number of parts: 2 for gate and up, 1 for a parameter that is a single hub tensor."""

    def part_rows(self, num_rows: int) -> list[int]:
        """Return the same number of rows for each part."""
        return [num_rows // self.num_parts] * self.num_parts

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """Yield the shard's share of each part."""
        rows = num_rows // self.num_parts
        for part in range(self.num_parts):
            yield Segment(part, shard * rows, (shard + 1) * rows)


@dataclass(frozen=True)
class Grouped:
    """Layout of attention, with the rows of each key head's query heads, of the key head, and of its value head.

    Shards are equal ranges of these rows. If there are more shards than key heads, a shard contains some rows of one
    key head, and Megatron Core gathers the projections.
    """

    queries_per_group: int
    """Number of query heads that share a key head."""
    head_dim: int
    """Number of rows of a head."""
    gated: bool = False
    """Whether attention has gates. The query part has the rows of each query head before those of its gate, and the
    parameter has the rows of a key head's query heads before those of their gates."""

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return (self.queries_per_group * self.head_dim * (1 + self.gated), self.head_dim, self.head_dim)

    def part_rows(self, num_rows: int) -> list[int]:
        """Return the numbers of query, key and value rows."""
        return [num_rows // sum(self._sizes) * size for size in self._sizes]

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """Yield the rows of query, key and value heads in the shard's range."""
        first, last = shard * num_rows, (shard + 1) * num_rows
        group_rows = sum(self._sizes)
        for group in range(first // group_rows, -(-last // group_rows)):
            at = group * group_rows
            for whole in self._group(group):
                start, stop = max(first - at, 0), min(last - at, whole.num_rows)
                if start < stop:
                    yield Segment(whole.part, whole.start + start, whole.start + stop)
                at += whole.num_rows

    def _group(self, group: int) -> Iterator[Segment]:
        """Yield the rows of a key head's query heads, of their gates, of the key head, and of its value head."""
        queries, size = range(group * self.queries_per_group, (group + 1) * self.queries_per_group), self.head_dim
        if self.gated:
            for place in (0, size):
                yield from (Segment(0, 2 * head * size + place, (2 * head + 1) * size + place) for head in queries)
        else:
            yield Segment(0, queries.start * size, queries.stop * size)
        for part in (1, 2):
            yield Segment(part, group * size, (group + 1) * size)


@dataclass(frozen=True)
class HeadRows:
    """Rows of a part that heads have in common distances."""

    part: int
    """Index of the part in the rule."""
    first: int
    """First row of the first head."""
    size: int
    """Number of adjacent rows of each head."""
    heads: int
    """Number of heads."""
    distance: int
    """Number of rows from one head to the next."""


@dataclass(frozen=True)
class ByHeads:
    """Layout of rows of heads, where each shard has its share of the heads of the first rows, then of the second."""

    rows: tuple[HeadRows, ...]
    """Rows of the whole parameter, in order."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each block of the whole parameter."""
        return tuple(each.size * each.heads for each in self.rows)

    def part_rows(self, num_rows: int) -> list[int]:
        """Return the number of rows of each part."""
        sizes: dict[int, int] = {}
        for each in self.rows:
            sizes[each.part] = sizes.get(each.part, 0) + each.size * each.heads
        return [sizes[part] for part in sorted(sizes)]

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """Yield the rows of the shard's heads. Adjacent heads form one segment."""
        for each in self.rows:
            share = each.heads // num_shards
            first = each.first + shard * share * each.distance
            count, size = (1, share * each.size) if each.size == each.distance else (share, each.size)
            for start in range(first, first + count * each.distance, each.distance):
                yield Segment(each.part, start, start + size)


def blocks(*sizes: int) -> ByHeads:
    """Return the layout of one part with several blocks of rows, where each shard has its share of each block."""
    firsts = (sum(sizes[:place]) for place in range(len(sizes)))
    return ByHeads(tuple(HeadRows(0, first, 1, size, 1) for first, size in zip(firsts, sizes, strict=True)))


class TensorSource(Protocol):
    """Hub tensors by name, such as `TensorFiles`."""

    def like(self, name: str) -> Tensor:
        """Return a tensor with the shape and dtype of a hub tensor, without its values."""

    def read(self, name: str, block: TensorBlock | None = None) -> Tensor:
        """Return the values of a hub tensor in a block, or all values if the block is None."""


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, with their location in a hub tensor."""

    name: str
    """Name of the hub tensor."""
    expert: int | None = None
    """Index of the expert in the first dimension of a tensor with all experts of a layer. None for other tensors."""
    share: tuple[int, int] = (0, 1)
    """`(i, n)` if the part is share i of n equal shares of the tensor's rows, as when one tensor has gate and up."""
    interleaved: bool = False
    """Whether share i consists of rows i, i + n, ... instead of adjacent rows."""
    transposed: bool = False
    """Whether rows of the parameter are columns of the hub tensor."""

    def read(self, source: TensorSource, rows: slice, columns: slice) -> Tensor:
        """Read a range of rows of the part and, if the part has two dimensions, of columns."""
        index, of = self.share
        values = source.read(self.name, self.block(source.like(self.name).shape, rows, columns))
        values = values if self.expert is None else values[0]
        values = values.t() if self.transposed else values
        return values[index::of] if self.interleaved else values

    def block(self, tensor_shape: Sequence[int], rows: slice, columns: slice) -> TensorBlock:
        """Return the smallest block of the hub tensor that contains the given rows and columns of the part."""
        index, of = self.share
        first = 0 if self.interleaved else index * self.shape_in(tensor_shape)[0]
        step = of if self.interleaved else 1
        sides = [(first + rows.start * step, first + rows.stop * step), (columns.start, columns.stop)]
        shape = self.shape_in(tensor_shape)
        sides = [*sides[: len(shape)], *((0, size) for size in shape[2:])]
        sides = sides[::-1] if self.transposed else sides
        sides = sides if self.expert is None else [(self.expert, self.expert + 1), *sides]
        return TensorBlock(tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))

    def in_tensor(self, values: Sequence[Tensor]) -> Tensor:
        """Return a `block` in the hub tensor's layout, from rows of the part or of interleaved shares."""
        rows = torch.stack(list(values), dim=1).flatten(0, 1) if self.interleaved else values[0]
        rows = rows.t() if self.transposed else rows
        return rows if self.expert is None else rows[None]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part as a view of a whole hub tensor."""
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
        """Return the shape of the hub tensor if the part has the given shape."""
        shape = (part_shape[0] * self.share[1], *part_shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.expert is None or num_experts is None else (num_experts, *shape)


@dataclass(frozen=True)
class Rule:
    """Description of one undivided parameter or buffer of the whole model."""

    parameter: str
    """Name of the parameter, with layer and expert numbers of the whole model."""
    parts: tuple[Part, ...]
    """Locations of the parameter's values in hub tensors."""
    layout: RowLayout = Stacked()
    """Order of the parts' rows in the parameter."""
    dim: int | None = None
    """Dimension that tensor parallelism divides. If None, every rank has the whole parameter."""
    expert: int | None = None
    """Number of the parameter's expert. None outside of experts."""
    stacked_parts: tuple[Part, ...] = ()
    """Locations in files whose tensors hold all experts of a layer; used instead of `parts` for such files."""
    full_precision: bool = False
    """Whether the parameter keeps its dtype if weights are sent in another dtype."""
    without_adapter: bool = False
    """Whether the parameter is the weight of a layer whose adapters PEFT does not load."""
    copy_of_tied: bool = False
    """Whether the parameter is the last pipeline stage's copy of a tied weight, which is not exported."""

    def part_shapes(self, shard_shape: Sequence[int], num_shards: int) -> list[tuple[int, ...]]:
        """Return the shape of each part of the whole parameter, given the shape and number of its shards."""
        shape = [size * num_shards if dim == self.dim else size for dim, size in enumerate(shard_shape)]
        return [(rows, *shape[1:]) for rows in self.layout.part_rows(shape[0])]

    def columns(self, shard_shape: Sequence[int], shard: int) -> slice:
        """Return the range of columns of a shard. It is empty for a parameter with one dimension."""
        width = shard_shape[1] if len(shard_shape) > 1 else 0
        first = shard * width if self.dim == 1 else 0
        return slice(first, first + width)

    def joined(self, index: int, shards: Sequence[Tensor]) -> Tensor:
        """Return a whole part, joined from its rows in all shards. It is a view if its rows are adjacent in one shard.

        Args:
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


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

_TRANSFORMER_ENGINE = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2"),
)
"""Patterns of names in Transformer Engine's modules, with the names in Megatron Core's own modules. A module of
Transformer Engine combines a norm with the following layer, or several experts."""


def own_name(name: str) -> str:
    """Return the parameter's name in Megatron Core's own modules, without Transformer Engine."""
    for pattern, replacement in _TRANSFORMER_ENGINE:
        name = re.sub(rf"(?<=\.){pattern}", replacement, name)
    return name


def global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Return the name of a parameter in the whole model.

    Args:
        name: name in one chunk of the model, without the wrappers' prefixes.
        layers: numbers of the chunk's layers in the whole model, from 0.
        first_expert: number of the rank's first expert.
    """
    name = _LAYER.sub(lambda found: f"decoder.layers.{layers[int(found[1])]}.", own_name(name))
    return _EXPERT.sub(lambda found: f".local_experts.{first_expert + int(found[1])}.", name)
