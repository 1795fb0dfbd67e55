"""What is asked of attention: which keys each query of a row sees, as a list of causal pieces, and how they score.

A piece is a run of queries and the run of keys it sees, under a causal mask aligned at the bottom right: the last
query sees the last key, the one before it all but the last. So one description serves a padded row (one piece), packed
segments (a piece each) and the part of a row that a context-parallel rank has (chunk x segment). Invariant: the
pieces' queries cover the row in order and without gaps; their keys may overlap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into weights.

    Attributes:
        scaling: factor on the scores; None means `D ** -0.5`.
        window: a query sees this many keys, itself included; None means all.
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
        sinks: `[H]` score of one more key of each head, which takes weight and has no value.
        dropout: probability that a weight is dropped.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax attention over a mask, and nothing else."""
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
        """Pairs of a query and a key that it sees."""
        return self.queries * self.keys - self.queries * (self.queries - 1) // 2


class Run(NamedTuple):
    """Pieces of one size, end to end.

    Attributes:
        queries: of each.
        keys: of each.
        pieces: how many.
    """

    queries: int
    keys: int
    pieces: int

    def stacked(self, tensor: Tensor) -> Tensor:
        """Pieces `[b, H, pieces * length, D]` as rows `[b * pieces, H, length, D]`."""
        if self.pieces == 1:
            return tensor
        return tensor.unflatten(2, (self.pieces, -1)).transpose(1, 2).flatten(0, 1)

    def end_to_end(self, tensor: Tensor) -> Tensor:
        """The way back."""
        if self.pieces == 1:
            return tensor
        return tensor.unflatten(0, (-1, self.pieces)).transpose(1, 2).flatten(2, 3)


class Bounds(NamedTuple):
    """A plan as varlen kernels take it.

    Attributes:
        queries: `[P + 1]` int32, where each piece begins among the queries.
        keys: `[P + 1]` int32, where each piece begins among the keys that are laid out piece after piece.
        longest_queries: queries of the longest piece, or more.
        longest_keys: keys of the longest piece, or more.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


class AttentionPlan:
    """The pieces of one row, the same for all rows of a microbatch and all layers.

    No dataclass: FSDP2 rebuilds those that a model's arguments hold, and what is computed once would be lost.

    Args:
        pieces: see the module docstring.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self._narrowed: dict[int, AttentionPlan] = {}
        self._bounds: dict[tuple[int, torch.device], Bounds] = {}

    @property
    def is_one_triangle(self) -> bool:
        """Whether plain causal attention over the row is all there is to do; False where that is not known."""
        return len(self.pieces) == 1 and self.pieces[0].queries == self.pieces[0].keys

    def within(self, window: int | None) -> "AttentionPlan":
        """The plan without the keys that no query of a piece sees through a sliding window."""
        if window is None or all(piece.keys == piece.queries for piece in self.pieces):
            return self
        if window not in self._narrowed:
            first = [max(p.key_start, p.key_stop - p.queries - window + 1) for p in self.pieces]
            pieces = [p._replace(key_start=start) for p, start in zip(self.pieces, first, strict=True)]
            self._narrowed[window] = AttentionPlan(pieces)
        return self._narrowed[window]

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The tensors `[b, H, T, D]` of each piece."""
        queries = query.split([piece.queries for piece in self.pieces], dim=2)
        return zip(queries, self._by_piece(key), self._by_piece(value), strict=True)

    def runs(self, keys: int) -> list[Run] | None:
        """Which pieces one call of a kernel can take; None where they do not divide so many keys between them."""
        return self._runs if self._adjoining_keys == keys else None

    @cached_property
    def _runs(self) -> list[Run]:
        sizes = groupby((piece.queries, piece.keys) for piece in self.pieces)
        return [Run(*size, len(list(equal))) for size, equal in sizes]

    @cached_property
    def _adjoining_keys(self) -> int | None:
        """Keys that the pieces divide between them, one piece after the other; None where they do not."""
        edges = [0, *(edge for piece in self.pieces for edge in (piece.key_start, piece.key_stop))]
        adjoin = all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=False))
        return edges[-1] if adjoin else None

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """Keys or values `[b, H, T, D]` laid out piece after piece."""
        if self._adjoining_keys == tensor.shape[2]:
            return tensor
        parts = self._by_piece(tensor)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """The pieces of as many rows, one row after the other."""
        if (rows, device) not in self._bounds:
            queries, keys = [piece.queries for piece in self.pieces], [piece.keys for piece in self.pieces]
            starts = [
                torch.tensor([0, *accumulate(lengths * rows)], dtype=torch.int32, device=device)
                for lengths in (queries, keys)
            ]
            self._bounds[rows, device] = Bounds(starts[0], starts[1], max(queries), max(keys))
        return self._bounds[rows, device]

    def _by_piece(self, tensor: Tensor) -> list[Tensor]:
        """A tensor's keys for each piece.

        Split, not sliced: the gradient of a slice is as long as the row, that of all parts of a split together.
        """
        ends = {end for piece in self.pieces for end in (piece.key_start, piece.key_stop)}
        edges = sorted({0, tensor.shape[2]} | ends)
        place = {edge: index for index, edge in enumerate(edges)}
        parts = tensor.split([stop - start for start, stop in pairwise(edges)], dim=2)
        runs = [parts[place[piece.key_start] : place[piece.key_stop]] for piece in self.pieces]
        return [run[0] if len(run) == 1 else torch.cat(run, dim=2) for run in runs]


@lru_cache(maxsize=16)
def plan_of_row(length: int) -> AttentionPlan:
    """A row that is one sequence, or one and its padding; kept, so that layers do not send its bounds again."""
    return AttentionPlan([Piece(0, length, 0, length)])


class PackedRow(AttentionPlan):
    """Segments end to end; on a GPU their bounds are used as they are, and nothing waits for their values.

    Args:
        bounds: `[S + 1]` int32, where each segment begins.
        longest: length of the longest segment; None asks the bounds.
    """

    def __init__(self, bounds: Tensor, longest: int | None) -> None:
        longest = longest if longest is not None else int(bounds.diff().max())
        self._row = Bounds(bounds, bounds, longest, longest)

    @cached_property
    def pieces(self) -> list[Piece]:  # type: ignore[override]
        """Asks the device."""
        return [Piece(start, stop, start, stop) for start, stop in pairwise(self._row.queries.tolist())]

    @property
    def is_one_triangle(self) -> bool:
        """Not asked."""
        return False

    def within(self, window: int | None) -> AttentionPlan:
        """Segments have as many keys as queries: nothing to leave out."""
        return self

    def keys_in_a_row(self, tensor: Tensor) -> Tensor:
        """They are."""
        return tensor

    def bounds(self, rows: int, device: torch.device) -> Bounds:
        """As given; a packed microbatch is one row."""
        return self._row
