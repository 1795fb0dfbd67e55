"""Compute attention so that the bits of a query's output depend only on the query and on the keys that it sees.

The keys of a sequence are divided into blocks of equal size, which begin at its first key, and the softmax is updated
block by block (FlashAttention, arXiv:2205.14135, algorithm 1). A block without a visible key changes nothing. So the
order of a sum does not depend on the length of the row, on other sequences, or on how many queries are computed at
once. Scores, weights and sums are in float32 or wider. Matrix products must treat rows alike (`row_invariance`).

Legend: `b` rows, `H` query heads, `K` key heads, `t` queries, `n` keys of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring
from nemo_rl.utils.errors import ConfigError

KEYS_PER_BLOCK = 64
_LOWEST = -1e30
"""Largest score before the first visible key. It is finite, so that its difference to itself is 0."""


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """Compute the attention of all pieces (`kernels.attend`). Pieces with similar numbers of queries are one batch.

    Raises:
        ConfigError: Weights are dropped.
    """
    if scoring.dropout:
        raise ConfigError(
            f"policy.zero_mismatch=true cannot drop attention weights, and the model drops {scoring.dropout:g} of "
            "them. Set policy.hf_config_overrides.attention_dropout=0."
        )
    pieces, cuts = plan.pieces, list(plan.cut(query, key, value))
    order = sorted(range(len(pieces)), key=lambda number: _size_class(pieces[number]))
    parts: dict[int, Tensor] = {}
    for _, group in groupby(order, key=lambda number: _size_class(pieces[number])):
        numbers = list(group)
        outputs = _attend_together(
            [pieces[number] for number in numbers], [cuts[number] for number in numbers], scoring
        )
        parts.update(zip(numbers, outputs, strict=True))
    return torch.cat([parts[number] for number in range(len(pieces))], dim=2)


@torch.no_grad()
def attend_to_ends(query: Tensor, key: Tensor, value: Tensor, lengths_b: Tensor, scoring: Scoring) -> Tensor:
    """Compute the attention of one query for each row to the first keys of the row, without gradients.

    The bits are those of `attend_in_blocks`. All blocks are multiplied at once, and their results are then added up in
    order.

    Args:
        query: `[b, H, 1, D]`.
        key: `[b, K, n, D]`.
        value: `[b, K, n, D_v]`. Keys and values that are not seen must be finite.
        lengths_b: `[b]` int64, number of keys that each query sees.
        scoring: the layer's scale, window, soft cap and sinks.

    Returns:
        `[b, H, 1, D_v]`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).transpose(1, 2).unflatten(2, (key.shape[1], -1)).transpose(1, 2)  # [b, K, 1, g, D]
    k, v = (_in_blocks(x, wide).unflatten(2, (-1, KEYS_PER_BLOCK)) for x in (key, value))
    scores = _scores_of_ends(q, k, lengths_b, scoring)
    largest = scores.new_full(q.shape[:-1], _LOWEST)
    total = torch.zeros_like(largest[:, :, 0])
    if scoring.sinks is not None:
        largest = scoring.sinks.to(wide).view(1, key.shape[1], 1, -1).expand(largest.shape)
        total = torch.ones_like(total)
    highest = torch.cat([largest, scores.amax(-1)], dim=2).cummax(2).values
    weights = (scores - highest[:, :, 1:, :, None]).exp()
    kept = (highest[:, :, :-1] - highest[:, :, 1:]).exp()
    sums, products = weights.sum(-1), weights @ v
    out = torch.zeros_like(products[:, :, 0])
    for block in range(k.shape[2]):
        total = total * kept[:, :, block] + sums[:, :, block]
        out = out * kept[:, :, block, :, None] + products[:, :, block]
    out /= total[..., None]
    return out.flatten(1, 2)[:, :, None].to(query.dtype)


def _scores_of_ends(q: Tensor, k: Tensor, lengths_b: Tensor, scoring: Scoring) -> Tensor:
    """Return scores `[b, K, B, g, n]` of queries `[b, K, 1, g, D]` and B blocks of keys `[b, K, B, n, D]`."""
    scores = scoring.capped((q @ k.transpose(-1, -2)) * scoring.scale(q))
    place = torch.arange(k.shape[2] * k.shape[3], device=k.device).view(k.shape[2:4])
    seen = scoring.sees(lengths_b[:, None, None] - 1 - place)
    return scores.masked_fill_(~seen[:, None, :, None], float("-inf"))


def _size_class(piece: Piece) -> int:
    """Return the number of binary digits of a piece's number of queries."""
    return piece.queries.bit_length()


def _attend_together(
    pieces: Sequence[Piece], cuts: Sequence[tuple[Tensor, Tensor, Tensor]], scoring: Scoring
) -> Iterator[Tensor]:
    """Yield the outputs `[b, H, t, D_v]` of some pieces, which are computed as rows of one padded batch."""
    queries, keys, values = map(_stacked, zip(*cuts, strict=True))
    rows = cuts[0][0].shape[0]
    first = torch.tensor([piece.keys - piece.queries for piece in pieces], device=queries.device)
    batch = _QueryBatch(first.repeat_interleave(rows), scoring)
    out: Tensor = _BlockAttention.apply(queries, keys, values, scoring.sinks, batch)
    return (each[:, :, : piece.queries] for each, piece in zip(out.split(rows), pieces, strict=True))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors `[b, H, T, D]` as rows `[parts * b, H, longest, D]`, padded with zeros at the end."""
    padded = pad_sequence([part.transpose(0, 2) for part in parts], batch_first=True)
    return padded.permute(0, 3, 2, 1, 4).flatten(0, 1)


@dataclass(frozen=True)
class _QueryBatch:
    """The keys that each query of a batch sees, and the scoring."""

    first_b: Tensor
    """`[b]` int64, number of keys before the key of each row's first query."""
    scoring: Scoring
    """The layer's scale, window, soft cap and sinks."""

    def scores(self, query: Tensor, key: Tensor, start: int, first_query: int) -> tuple[Tensor, Tensor]:
        """Return scores `[b, K, g, t, n]` of a block of keys, and the scores before masks, for the gradient of a cap.

        Args:
            query: `[b, K, g, t, D]`, queries from `first_query`.
            key: `[b, K, n, D]`.
            start: Number of keys before the block.
            first_query: Number of queries of the batch before these.
        """
        grouped = query.flatten(2, 3) @ key.transpose(-1, -2)
        raw = self.scoring.capped(grouped.unflatten(2, query.shape[2:4]) * self.scoring.scale(query))
        place_t = torch.arange(first_query, first_query + query.shape[3], device=query.device)
        distance = (
            self.first_b[:, None, None] + place_t[:, None] - (start + torch.arange(key.shape[2])).to(query.device)
        )
        return raw.masked_fill(~self.scoring.sees(distance)[:, None, None], float("-inf")), raw

    def first_query(self, start: int) -> int:
        """Return the number of queries at the beginning of all rows that see no key from `start` on."""
        return max(0, start - int(self.first_b.max()))


class _BlockAttention(torch.autograd.Function):
    """Attention of a batch, with weights that are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, batch: _QueryBatch
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = _grouped(query.to(wide), key.shape[1]), _in_blocks(key, wide), _in_blocks(value, wide)
        largest = q.new_full(q.shape[:-1], _LOWEST)
        total = torch.zeros_like(largest)
        if sinks is not None:
            largest = sinks.to(wide).view(1, *q.shape[1:3], 1).expand(largest.shape).clone()
            total = torch.ones_like(largest)
        out = q.new_zeros(*q.shape[:-1], value.shape[-1])
        for start in range(0, k.shape[2], KEYS_PER_BLOCK):
            rest = slice(batch.first_query(start), None)
            block = slice(start, start + KEYS_PER_BLOCK)
            scores, _ = batch.scores(q[..., rest, :], k[:, :, block], start, rest.start)
            higher = torch.maximum(largest[..., rest], scores.amax(-1))
            weights, kept = (scores - higher[..., None]).exp(), (largest[..., rest] - higher).exp()
            total[..., rest] = total[..., rest] * kept + weights.sum(-1)
            product = (weights.flatten(2, 3) @ v[:, :, block]).unflatten(2, weights.shape[2:4])
            out[..., rest, :] = out[..., rest, :] * kept[..., None] + product
            largest[..., rest] = higher
        out /= total[..., None]
        ctx.save_for_backward(query, key, value, sinks, out, largest + total.log())
        ctx.batch = batch
        return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, sinks, out, log_total = ctx.saved_tensors
        batch: _QueryBatch = ctx.batch
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = _grouped(query.to(wide), key.shape[1]), _in_blocks(key, wide), _in_blocks(value, wide)
        grad = _grouped(grad_out.to(wide), key.shape[1])
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        inner = (grad * out).sum(-1)
        for start in range(0, k.shape[2], KEYS_PER_BLOCK):
            rest = slice(batch.first_query(start), None)
            block = slice(start, start + KEYS_PER_BLOCK)
            q_rest, grad_rest = q[..., rest, :], grad[..., rest, :]
            scores, raw = batch.scores(q_rest, k[:, :, block], start, rest.start)
            weights = (scores - log_total[..., rest, None]).exp()
            grad_v[:, :, block] = weights.flatten(2, 3).transpose(-1, -2) @ grad_rest.flatten(2, 3)
            of_weights = (grad_rest.flatten(2, 3) @ v[:, :, block].transpose(-1, -2)).unflatten(2, weights.shape[2:4])
            of_scores = weights * (of_weights - inner[..., rest, None]) * batch.scoring.scale(q)
            if batch.scoring.softcap is not None:
                of_scores = of_scores * (1 - (raw / batch.scoring.softcap).square())
            flat = of_scores.flatten(2, 3)
            grad_q[..., rest, :] += (flat @ k[:, :, block]).unflatten(2, weights.shape[2:4])
            grad_k[:, :, block] = flat.transpose(-1, -2) @ q_rest.flatten(2, 3)
        grad_sinks = None
        if sinks is not None:
            share = (sinks.to(wide).view(1, *q.shape[1:3], 1) - log_total).exp()
            grad_sinks = -(share * inner).sum((0, 3)).flatten().to(sinks.dtype)
        keys = key.shape[2]
        return (
            grad_q.flatten(1, 2).to(query.dtype),
            grad_k[:, :, :keys].to(key.dtype),
            grad_v[:, :, :keys].to(value.dtype),
            grad_sinks,
            None,
        )


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Reshape `[b, H, t, D]` to `[b, K, g, t, D]`: consecutive query heads share a key head."""
    return x.unflatten(1, (key_heads, -1))


def _in_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values `[b, K, T, D]`, and pad them with zeros to whole blocks.

    The result is contiguous, because products of blocks would copy other tensors once for each block.
    """
    missing = -x.shape[2] % KEYS_PER_BLOCK
    return F.pad(x.to(dtype, memory_format=torch.contiguous_format), (0, 0, 0, missing))
