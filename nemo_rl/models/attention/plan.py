"""Describe an attention call by causal pieces, which list the keys that each query of a row sees, and by the scoring.

A piece is a range of queries and the range of keys that they see, under a causal mask aligned at the bottom right: the
last query sees all keys, and the query before it sees all keys but the last. A padded row is one piece. Each segment of
a packed row is a piece. The part of a row that a context-parallel rank holds has one piece for each chunk and segment.
Invariant: the queries of the pieces cover the row in order and without gaps. Their keys may overlap.
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
    """Settings with which a layer computes attention weights from queries and keys."""

    scaling: float | None = None
    """Factor on the scores, or None for `D ** -0.5`."""
    window: int | None = None
    """Number of keys that a query sees, including the key of its own token, or None for all keys."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None leaves scores unchanged."""
    sinks: Tensor | None = None
    """`[H]` score of one extra key per head, which is in the softmax and has no value."""
    dropout: float = 0.0
    """Probability that a weight is dropped."""

    @property
    def is_plain(self) -> bool:
        """True for plain softmax attention over a mask, without soft cap and sinks."""
        return self.softcap is None and self.sinks is None

    def scale(self, query: Tensor) -> float:
        """Return the factor on the scores of queries `[..., D]`."""
        return self.scaling if self.scaling is not None else query.shape[-1] ** -0.5

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores after the soft cap."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def sees(self, distance: Tensor) -> Tensor:
        """Return whether a query sees a key, as bool, for the numbers of tokens from the key to the query."""
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


class Piece(NamedTuple):
    """Queries `[query_start, query_stop)` that see keys `[key_start, key_stop)` causally."""

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
        """Number of pairs of a query and a visible key."""
        return self.queries * self.keys - self.queries * (self.queries - 1) // 2


class PieceRun(NamedTuple):
    """Adjacent pieces of one size."""

    queries: int
    """Number of queries of each piece."""
    keys: int
    """Number of keys of each piece."""
    pieces: int
    """Number of pieces."""

    def stacked(self, tensor: Tensor) -> Tensor:
        """Reshape pieces `[b, H, pieces * length, D]` to rows `[b * pieces, H, length, D]`."""
        if self.pieces == 1:
            return tensor
        return tensor.unflatten(2, (self.pieces, -1)).transpose(1, 2).flatten(0, 1)

    def end_to_end(self, tensor: Tensor) -> Tensor:
        """Reshape rows `[b * pieces, H, length, D]` back to `[b, H, pieces * length, D]`."""
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
    """Upper bound of the number of queries of a piece."""
    longest_keys: int
    """Upper bound of the number of keys of a piece."""


class AttentionPlan:
    """The pieces of one row, the same for all rows of a microbatch and all layers.

    The class is not a dataclass: FSDP2 rebuilds dataclasses in a model's arguments and would lose cached values.

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
        """Return the plan without keys that are outside the sliding window of all queries of their piece."""
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
        """Return runs of equal-sized pieces, or None if the pieces do not cover the `keys` keys in order."""
        return self._runs if self._adjoining_keys == keys else None

    @cached_property
    def _runs(self) -> list[PieceRun]:
        sizes = groupby((piece.queries, piece.keys) for piece in self.pieces)
        return [PieceRun(*size, len(list(equal))) for size, equal in sizes]

    @cached_property
    def _adjoining_keys(self) -> int | None:
        """Number of keys of all pieces, or None if the pieces have gaps, overlap or are not in order."""
        edges = [0, *(edge for piece in self.pieces for edge in (piece.key_start, piece.key_stop))]
        adjoin = all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=False))
        return edges[-1] if adjoin else None

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """Return the keys or values `[b, H, T, D]` of one piece after another. Keys in several pieces are repeated."""
        if self._adjoining_keys == tensor.shape[2]:
            return tensor
        parts = self._by_piece(tensor)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """Return the bounds of the pieces of `rows` concatenated rows, without waiting for the device."""
        if (rows, device) not in self._bounds:
            queries, keys = [piece.queries for piece in self.pieces], [piece.keys for piece in self.pieces]
            starts = [
                to_device(torch.tensor([0, *accumulate(lengths * rows)], dtype=torch.int32), device)
                for lengths in (queries, keys)
            ]
            self._bounds[rows, device] = Bounds(starts[0], starts[1], max(queries), max(keys))
        return self._bounds[rows, device]

    def _by_piece(self, tensor: Tensor) -> list[Tensor]:
        """Return the keys of each piece.

        The tensor is split instead of sliced, because the gradient of every slice would be as long as the row.
        """
        ends = {end for piece in self.pieces for end in (piece.key_start, piece.key_stop)}
        edges = sorted({0, tensor.shape[2]} | ends)
        place = {edge: index for index, edge in enumerate(edges)}
        parts = tensor.split([stop - start for start, stop in pairwise(edges)], dim=2)
        runs = [parts[place[piece.key_start] : place[piece.key_stop]] for piece in self.pieces]
        return [run[0] if len(run) == 1 else torch.cat(run, dim=2) for run in runs]


@lru_cache(maxsize=16)
def plan_of_row(length: int) -> AttentionPlan:
    """Return the plan of a row that is one sequence. It is cached, so that its bounds are copied to the device once."""
    return AttentionPlan([Piece(0, length, 0, length)])


class PackedRow(AttentionPlan):
    """The plan of a packed row of segments, whose bounds stay on the device so that the host does not wait.

    Args:
        bounds: `[S + 1]` int32, start of each segment, and the end of the last.
        longest: length of the longest segment; if None, it is computed from the bounds.
    """

    def __init__(self, bounds: Tensor, longest: int | None) -> None:
        longest = longest if longest is not None else int(bounds.diff().max())
        self._row = Bounds(bounds, bounds, longest, longest)

    @cached_property
    def pieces(self) -> list[Piece]:  # type: ignore[override]
        """The pieces of the row. Reading this property waits for the device."""
        return [Piece(start, stop, start, stop) for start, stop in pairwise(self._row.queries.tolist())]

    @property
    def is_one_triangle(self) -> bool:
        """False, because the number of segments is not known without waiting for the device."""
        return False

    def within(self, window: int | None) -> AttentionPlan:
        """Return the plan itself, because each segment has as many keys as queries and each key is seen."""
        return self

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, because packed segments are already in order, piece after piece."""
        return tensor

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """Return the bounds of the row. A packed microbatch has only one row."""
        return self._row
