"""Compute attention over the keys and values of a cache, for the new tokens of an engine's sequences.

The new tokens of all sequences form one row of the model, and a plan says which cached tokens each of them sees. On
CPUs, sequences with one new token are computed as rows of padded batches (`_LastTokens`), because a call for each of
them takes longer than its arithmetic. Invariant: a token sees the tokens of its own sequence up to itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl.host.row_invariance import rows_are_alike
from nemo_rl.models.attention.blocks import KEYS_PER_BLOCK, attend_to_ends
from nemo_rl.models.attention.kernels import attend, masked_attention
from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring

type KeysAndValues = tuple[Tensor, Tensor]
"""Cached keys `[places, H_kv, D]` and values `[places, H_kv, D_v]` of a layer."""


class _LastTokens(NamedTuple):
    """Sequences with one new token each, which sees all tokens of its sequence."""

    queries: Tensor
    """`[g]` int64, index of each new token."""
    places: Tensor
    """`[g, n]` int64, cache positions of the sequences' tokens. After the last token, the first one is repeated."""
    lengths: Tensor
    """`[g]` int64, number of tokens of each sequence."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention `[g, H, D_v]` of queries `[g, H, D]` to cached keys and values."""
        rows, size = self.places.flatten(), self.places.shape
        key, value = (kept.index_select(0, rows).unflatten(0, size).transpose(1, 2) for kept in (keys, values))
        query = query[:, :, None]
        if rows_are_alike():
            return attend_to_ends(query, key, value, self.lengths, scoring)[:, :, 0]
        distance = self.lengths[:, None] - 1 - torch.arange(key.shape[2], device=key.device)
        return masked_attention(query, key, value, scoring.sees(distance)[:, None, None], scoring)[:, :, 0]


class _Rest(NamedTuple):
    """Sequences with several new tokens."""

    queries: Tensor
    """`[t]` int64, indices of the new tokens."""
    places: Tensor
    """`[k]` int64, cache positions of their sequences' tokens."""
    plan: AttentionPlan
    """The tokens of `places` that each new token sees."""


class SeenTokens:
    """The tokens of a cache that the new tokens of a pass see. All layers of a pass share it.

    Args:
        places: `[K]` int64, cache positions of the earlier and new tokens of each sequence, one sequence after another.
        plan: The entries of `places` that each new token sees.
    """

    def __init__(self, places: Tensor, plan: AttentionPlan) -> None:
        self._places, self._plan = places, plan

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of the new tokens, whose keys and values are already in the cache.

        Args:
            query: `[T, H, D]`.
            keys: `[positions, H_kv, D]`.
            values: `[positions, H_kv, D_v]`.
            scoring: the layer's scale, window, soft cap and sinks.

        Returns:
            `[T, H, D_v]`.
        """
        if query.device.type != "cpu" or not (rows_are_alike() or scoring.is_plain):
            return _attend_places(query, keys, values, self._places, self._plan, scoring)
        out = query.new_empty(*query.shape[:2], values.shape[2])
        for group in self._last_tokens:
            part = group.attend(query.index_select(0, group.queries), keys, values, scoring)
            out.index_copy_(0, group.queries, part)
        if self._rest is not None:
            chosen = query.index_select(0, self._rest.queries)
            part = _attend_places(chosen, keys, values, self._rest.places, self._rest.plan, scoring)
            out.index_copy_(0, self._rest.queries, part)
        return out

    @cached_property
    def _last_tokens(self) -> list[_LastTokens]:
        """The sequences with one new token, in batches in which no sequence is twice as long as another."""
        pieces = sorted((piece for piece in self._plan.pieces if piece.queries == 1), key=lambda piece: piece.keys)
        groups = groupby(pieces, key=lambda piece: piece.keys.bit_length())
        return [self._batch(list(group)) for _, group in groups]

    def _batch(self, pieces: Sequence[Piece]) -> _LastTokens:
        longest = max(piece.keys for piece in pieces)
        width = longest + -longest % KEYS_PER_BLOCK
        rows = [self._places[piece.key_start : piece.key_stop] for piece in pieces]
        filled = [torch.cat([row, row[:1].expand(width - len(row))]) for row in rows]
        queries, lengths = (
            torch.tensor(numbers, device=self._places.device)
            for numbers in ([piece.query_start for piece in pieces], [piece.keys for piece in pieces])
        )
        return _LastTokens(queries, torch.stack(filled), lengths)

    @cached_property
    def _rest(self) -> _Rest | None:
        """The sequences with several new tokens, or None if there are none."""
        pieces = [piece for piece in self._plan.pieces if piece.queries > 1]
        if not pieces:
            return None
        device = self._places.device
        queries = [torch.arange(piece.query_start, piece.query_stop, device=device) for piece in pieces]
        places = [self._places[piece.key_start : piece.key_stop] for piece in pieces]
        return _Rest(torch.cat(queries), torch.cat(places), AttentionPlan(list(_side_by_side(pieces))))


def _side_by_side(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces of the same sizes without gaps between them."""
    queries = pairwise(accumulate((piece.queries for piece in pieces), initial=0))
    keys = pairwise(accumulate((piece.keys for piece in pieces), initial=0))
    return (Piece(*query, *key) for query, key in zip(queries, keys, strict=True))


def _attend_places(
    query: Tensor, keys: Tensor, values: Tensor, places: Tensor, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """Return the `[T, H, D_v]` attention of queries `[T, H, D]` to cache positions."""
    key, value = (kept.index_select(0, places).transpose(0, 1)[None] for kept in (keys, values))
    return attend(query.transpose(0, 1)[None], key, value, plan, scoring)[0].transpose(0, 1)


@dataclass(frozen=True)
class CachedPass:
    """The new tokens of one forward pass, and the cache positions of new and earlier tokens."""

    token_ids: Tensor
    """`[T]` int64, ids of the new tokens."""
    positions: Tensor
    """`[T]` int64, position of each new token in its sequence."""
    new: Tensor
    """`[T]` int64, cache positions of the new tokens."""
    seen: Tensor
    """`[K]` int64, cache positions of the earlier and new tokens of each sequence, one sequence after another."""
    plan: AttentionPlan
    """The tokens of `seen` that each new token sees."""
    last: Tensor
    """`[b]` int64, index of the last token of each sequence among the T tokens."""
    num_places: int
    """Number of positions of the cache."""
    layers: dict[int, KeysAndValues]
    """Cache of each layer, by layer number. `attend` allocates it in the first pass."""

    @cached_property
    def _seen_tokens(self) -> SeenTokens:
        return SeenTokens(self.seen, self.plan)

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Store a layer's new keys and values in the cache, and compute the attention of the new tokens.

        Args:
            query: `[T, 1, H, D]`.
            key: `[T, 1, H_kv, D]`.
            value: `[T, 1, H_kv, D_v]`.
            scoring: the layer's scale, window and sinks.

        Returns:
            `[T, 1, H * D_v]`.
        """
        if layer_number not in self.layers:
            self.layers[layer_number] = (self._empty_like(key), self._empty_like(value))
        keys, values = self.layers[layer_number]
        keys.index_copy_(0, self.new, key[:, 0])
        values.index_copy_(0, self.new, value[:, 0])
        return self._seen_tokens.attend(query[:, 0], keys, values, scoring).flatten(1)[:, None]

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_empty(self.num_places, *new.shape[2:])
