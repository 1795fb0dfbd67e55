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
from torch.nn.utils.rnn import pad_sequence

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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention `[g, H, 1, D_v]` of queries `[g, H, 1, D]` to keys and values `[g, H_kv, n, D]`."""
        if rows_are_alike():
            return attend_to_ends(query, key, value, self.lengths, scoring)
        distance = self.lengths[:, None] - 1 - torch.arange(key.shape[2], device=key.device)
        seen = distance >= 0
        if scoring.window is not None:
            seen &= distance < scoring.window
        return masked_attention(query, key, value, seen[:, None, None], scoring)


class _Rest(NamedTuple):
    """Sequences with several new tokens."""

    queries: Tensor
    """`[t]` int64, indices of the new tokens."""
    seen: Tensor
    """`[k]` int64, cache positions of their sequences' tokens."""
    plan: AttentionPlan
    """The tokens of `seen` that each new token sees."""


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
        if query.device.type == "cpu" and (rows_are_alike() or scoring.is_plain):
            return self._by_length(query, keys, values, scoring)
        return _attend_seen(query, keys, values, self.seen, self.plan, scoring)

    def _by_length(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of sequences with one new token in batches, and then that of all others."""
        out = query.new_empty(len(query), 1, query.shape[2] * values.shape[2])
        for ends in self._ends:
            rows, size = ends.places.flatten(), ends.places.shape
            key, value = (kept.index_select(0, rows).unflatten(0, size).transpose(1, 2) for kept in (keys, values))
            part = ends.attend(query.index_select(0, ends.queries).transpose(1, 2), key, value, scoring)
            out.index_copy_(0, ends.queries, part.transpose(1, 2).flatten(2))
        if self._rest is not None:
            chosen = query.index_select(0, self._rest.queries)
            part = _attend_seen(chosen, keys, values, self._rest.seen, self._rest.plan, scoring)
            out.index_copy_(0, self._rest.queries, part)
        return out

    @cached_property
    def _ends(self) -> list[_LastTokens]:
        """The sequences with one new token, in batches in which no sequence is twice as long as another."""
        pieces = sorted((piece for piece in self.plan.pieces if piece.queries == 1), key=lambda piece: piece.keys)
        groups = groupby(pieces, key=lambda piece: piece.keys.bit_length())
        return [self._batch(list(group)) for _, group in groups]

    def _batch(self, pieces: Sequence[Piece]) -> _LastTokens:
        longest = max(piece.keys for piece in pieces)
        width = longest + -longest % KEYS_PER_BLOCK
        rows = [self.seen[piece.key_start : piece.key_stop] for piece in pieces]
        filled = [torch.cat([row, row[:1].expand(width - len(row))]) for row in rows]
        queries, lengths = (
            torch.tensor(numbers, device=self.seen.device)
            for numbers in ([piece.query_start for piece in pieces], [piece.keys for piece in pieces])
        )
        return _LastTokens(queries, pad_sequence(filled, batch_first=True), lengths)

    @cached_property
    def _rest(self) -> _Rest | None:
        """The sequences with several new tokens, or None if there are none."""
        pieces = [piece for piece in self.plan.pieces if piece.queries > 1]
        if not pieces:
            return None
        indices = torch.arange(max(len(self.token_ids), len(self.seen)), device=self.seen.device)
        queries = torch.cat([indices[piece.query_start : piece.query_stop] for piece in pieces])
        seen = torch.cat([self.seen[piece.key_start : piece.key_stop] for piece in pieces])
        return _Rest(queries, seen, AttentionPlan(list(_side_by_side(pieces))))

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_empty(self.num_places, *new.shape[2:])


def _side_by_side(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces of the same sizes without gaps between them."""
    queries = pairwise(accumulate((piece.queries for piece in pieces), initial=0))
    keys = pairwise(accumulate((piece.keys for piece in pieces), initial=0))
    return (Piece(*query, *key) for query, key in zip(queries, keys, strict=True))


def _attend_seen(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """Return the `[T, 1, H * D_v]` attention of queries `[T, 1, H, D]` to the cache positions `seen`."""
    key, value = (kept.index_select(0, seen).transpose(0, 1)[None] for kept in (keys, values))
    return attend(query.permute(1, 2, 0, 3), key, value, plan, scoring).permute(2, 0, 1, 3).flatten(2)
