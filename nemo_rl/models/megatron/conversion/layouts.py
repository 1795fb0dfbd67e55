"""Map the rows of a parameter's tensor-parallel shards to rows of hub tensors.

A parameter of Megatron Core consists of rows of one or several hub tensors, its parts: a gated layer holds gate above
up, attention holds query, key and value heads by groups. Reading and writing both use a `Layout`.

Invariant: the segments of all shards cover every row of every part once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a part in a shard."""

    part: int
    """Index of the part."""
    start: int
    """First row."""
    stop: int
    """End of the rows, exclusive."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class Layout(Protocol):
    """Order of the rows of the parts in each shard of a parameter."""

    def part_rows(self, num_rows: int) -> list[int]:
        """Return the rows of each part of a whole parameter with `num_rows` rows."""

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """Yield the segments of a shard of `num_rows` rows, in order."""


@dataclass(frozen=True)
class Stacked:
    """Parts of the same size; each shard holds its share of the first part, then of the second part, and so on."""

    num_parts: int = 1
    """2 for gate above up; 1 for a parameter that is one hub tensor."""

    def part_rows(self, num_rows: int) -> list[int]:
        """See `Layout`."""
        return [num_rows // self.num_parts] * self.num_parts

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """See `Layout`."""
        rows = num_rows // self.num_parts
        for part in range(self.num_parts):
            yield Segment(part, shard * rows, (shard + 1) * rows)


@dataclass(frozen=True)
class Grouped:
    """Queries, keys and values of attention; for each key head: the query heads that share it, the key, the value.

    Shards are equal ranges of these rows. With more shards than key heads the ranges divide groups, and Megatron Core
    gathers the projections.
    """

    queries_per_group: int
    """Number of query heads that share a key head."""
    head_dim: int
    """Number of rows of a head."""

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return (self.queries_per_group * self.head_dim, self.head_dim, self.head_dim)

    def part_rows(self, num_rows: int) -> list[int]:
        """See `Layout`."""
        return [num_rows // sum(self._sizes) * size for size in self._sizes]

    def segments(self, num_rows: int, shard: int, num_shards: int) -> Iterator[Segment]:
        """See `Layout`."""
        first, last = shard * num_rows, (shard + 1) * num_rows
        group_rows = sum(self._sizes)
        for group in range(first // group_rows, -(-last // group_rows)):
            at = group * group_rows
            for part, size in enumerate(self._sizes):
                start, stop = max(first - at, 0), min(last - at, size)
                if start < stop:
                    yield Segment(part, group * size + start, group * size + stop)
                at += size
