"""Describe an attention call: the keys that each query of a row sees, as a list of causal pieces, and the scoring.

A piece is a range of queries and the range of keys they see, under a causal mask aligned at the bottom right: the last
query sees all keys, the one before it all keys but the last. The same description covers a padded row (one piece),
packed segments (one piece each) and the part of a row that a context-parallel rank holds (one piece per chunk and
segment). Invariant: the pieces' queries cover the row in order and without gaps; their keys may overlap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl.host.device import to_device


@dataclass(frozen=True)
class Scoring:
    """Settings with which a layer turns queries and keys into weights."""

    scaling: float | None = None
    """Factor on the scores; None means `D ** -0.5`."""
    window: int | None = None
    """Number of keys that a query sees, its own included; None means all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None leaves scores unchanged."""
    sinks: Tensor | None = None
    """`[H]` score of one extra key per head, which takes weight and has no value."""
    dropout: float = 0.0
    """Probability that a weight is dropped."""

    @property
    def is_plain(self) -> bool:
        """True for plain softmax attention over a mask, without soft cap and sinks."""
        return self.softcap is None and self.sinks is None


class Piece(NamedTuple):
    """Queries `[query_start, query_stop)` see keys `[key_start, key_stop)`, causally from the bottom right."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.query_stop - self.query_start

    @property
    def keys(self) -> int:
        """Number of keys, at least as many as queries."""
        return self.key_stop - self.key_start

    @property
    def work(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        return self.queries * self.keys - self.queries * (self.queries - 1) // 2


class PieceRun(NamedTuple):
    """Adjacent pieces of one size."""

    queries: int
    """Queries per piece."""
    keys: int
    """Keys per piece."""
    pieces: int
    """Number of pieces."""

    def stacked(self, tensor: Tensor) -> Tensor:
        """Turn pieces `[b, H, pieces * length, D]` into rows `[b * pieces, H, length, D]`."""
        if self.pieces == 1:
            return tensor
        return tensor.unflatten(2, (self.pieces, -1)).transpose(1, 2).flatten(0, 1)

    def end_to_end(self, tensor: Tensor) -> Tensor:
        """Turn rows `[b * pieces, H, length, D]` back into `[b, H, pieces * length, D]`."""
        if self.pieces == 1:
            return tensor
        return tensor.unflatten(0, (-1, self.pieces)).transpose(1, 2).flatten(2, 3)


class Bounds(NamedTuple):
    """A plan in the form that varlen kernels take."""

    queries: Tensor
    """`[P + 1]` int32, start of each piece among the queries."""
    keys: Tensor
    """`[P + 1]` int32, start of each piece among the keys, which are laid out piece after piece."""
    longest_queries: int
    """Upper bound on the queries of a piece."""
    longest_keys: int
    """Upper bound on the keys of a piece."""


class AttentionPlan:
    """The pieces of one row, the same for all rows of a microbatch and all layers.

    Not a dataclass: FSDP2 rebuilds dataclasses in a model's arguments, and cached values would be lost.

    Args:
        pieces: see the module docstring.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self._narrowed: dict[int, AttentionPlan] = {}
        self._bounds: dict[tuple[int, torch.device], Bounds] = {}

    @property
    def is_one_triangle(self) -> bool:
        """True if the plan is known to be plain causal attention over the row."""
        return len(self.pieces) == 1 and self.pieces[0].queries == self.pieces[0].keys

    def within(self, window: int | None) -> "AttentionPlan":
        """Return the plan without the keys that no query of a piece sees through a sliding window."""
        if window is None or all(piece.keys == piece.queries for piece in self.pieces):
            return self
        if window not in self._narrowed:
            first = [max(p.key_start, p.key_stop - p.queries - window + 1) for p in self.pieces]
            pieces = [p._replace(key_start=start) for p, start in zip(self.pieces, first, strict=True)]
            self._narrowed[window] = AttentionPlan(pieces)
        return self._narrowed[window]

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Split the tensors `[b, H, T, D]` into the tensors of each piece."""
        queries = query.split([piece.queries for piece in self.pieces], dim=2)
        return zip(queries, self._by_piece(key), self._by_piece(value), strict=True)

    def runs(self, keys: int) -> list[PieceRun] | None:
        """Group the pieces that one kernel call can take, or return None unless they tile the `keys` keys in order."""
        return self._runs if self._adjoining_keys == keys else None

    @cached_property
    def _runs(self) -> list[PieceRun]:
        sizes = groupby((piece.queries, piece.keys) for piece in self.pieces)
        return [PieceRun(*size, len(list(equal))) for size, equal in sizes]

    @cached_property
    def _adjoining_keys(self) -> int | None:
        """Number of keys if the pieces tile them in order, without gaps or overlap, or else None."""
        edges = [0, *(edge for piece in self.pieces for edge in (piece.key_start, piece.key_stop))]
        adjoin = all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=False))
        return edges[-1] if adjoin else None

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """Lay out keys or values `[b, H, T, D]` piece after piece."""
        if self._adjoining_keys == tensor.shape[2]:
            return tensor
        parts = self._by_piece(tensor)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """Return the bounds of the pieces of `rows` rows, one row after the other, without waiting for the device."""
        if (rows, device) not in self._bounds:
            queries, keys = [piece.queries for piece in self.pieces], [piece.keys for piece in self.pieces]
            starts = [
                to_device(torch.tensor([0, *accumulate(lengths * rows)], dtype=torch.int32), device)
                for lengths in (queries, keys)
            ]
            self._bounds[rows, device] = Bounds(starts[0], starts[1], max(queries), max(keys))
        return self._bounds[rows, device]

    def _by_piece(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor's keys for each piece.

        The tensor is split, not sliced: each slice would have a gradient as long as the row; a split has one in all.
        """
        ends = {end for piece in self.pieces for end in (piece.key_start, piece.key_stop)}
        edges = sorted({0, tensor.shape[2]} | ends)
        place = {edge: index for index, edge in enumerate(edges)}
        parts = tensor.split([stop - start for start, stop in pairwise(edges)], dim=2)
        runs = [parts[place[piece.key_start] : place[piece.key_stop]] for piece in self.pieces]
        return [run[0] if len(run) == 1 else torch.cat(run, dim=2) for run in runs]


@lru_cache(maxsize=16)
def plan_of_row(length: int) -> AttentionPlan:
    """Return the plan of a row that is one sequence from a cache, so that its bounds go to the device only once."""
    return AttentionPlan([Piece(0, length, 0, length)])


class PackedRow(AttentionPlan):
    """Segments end to end, whose bounds stay on the device, so that the host does not wait for a GPU.

    Args:
        bounds: `[S + 1]` int32, start of each segment, and the end of the last.
        longest: length of the longest segment; None reads it from the bounds.
    """

    def __init__(self, bounds: Tensor, longest: int | None) -> None:
        longest = longest if longest is not None else int(bounds.diff().max())
        self._row = Bounds(bounds, bounds, longest, longest)

    @cached_property
    def pieces(self) -> list[Piece]:  # type: ignore[override]
        """The pieces of the row, whose reading waits for the device."""
        return [Piece(start, stop, start, stop) for start, stop in pairwise(self._row.queries.tolist())]

    @property
    def is_one_triangle(self) -> bool:
        """False: the number of segments is not known without waiting for the device."""
        return False

    def within(self, window: int | None) -> AttentionPlan:
        """Return the plan itself: a segment has as many keys as queries, so that a window leaves out none."""
        return self

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: packed segments are already laid out piece after piece."""
        return tensor

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """Return the given bounds, since a packed microbatch is one row."""
        return self._row
