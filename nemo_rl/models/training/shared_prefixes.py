"""Lay out a packed microbatch so that it contains tokens that several rows share only once.

    row 0: p a b          packed:  p a b, p a c, p d, e
    row 1: p a c    ─►
    row 2: p d            shared:  p, a, b, c, d, e
    row 3: e

All operations except attention and recurrent layers treat tokens one by one, and a token's hidden state depends only on
the tokens before it. So the samples of a group need their prompt only once, and the branches of a session their common
answers: 16 answers as long as their prompt take 17 parts instead of 32. In attention, the keys of each part follow the
keys of all parts before it. Recurrent layers begin a part with the state after the part before it
(`huggingface.shared_states`). A shared token is scored once, and each of its rows gets the score, so that the loss of
each row has its own advantage and mask. Invariant: scores and gradients equal those of separate rows except for the
last digits, because sums have another order. `data.common_prefixes` finds the tokens that rows share.

Source: Prefix Grouper (Liu et al. 2025, arXiv:2506.05433), here extended to trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.models.attention.plan import AttentionPlan, Piece


class SharedPrefixes:
    """The `DividedRow` of this layout. In attention, the keys of a part follow those of all parts before it.

    Args:
        lengths: Number of tokens of each part of the layout. Their sum is the layout's length.
        parents: For each part, the part before it in its rows (earlier in the layout). None if rows begin with it.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int | None]) -> None:
        self.lengths, self.parents = list(lengths), list(parents)
        self._chains: list[list[int]] = []
        for part, parent in enumerate(parents):
            self._chains.append([part] if parent is None else [*self._chains[parent], part])
        keys = [sum(lengths[part] for part in chain) for chain in self._chains]
        bounds = (pairwise(accumulate(each, initial=0)) for each in (lengths, keys))
        self.plan = AttentionPlan([Piece(*query, *key) for query, key in zip(*bounds, strict=True)])

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put the keys and values of its prefix before those of each part (`DividedRow.enter`)."""
        return query, self._with_prefixes(key), self._with_prefixes(value)

    def leave(self, out: Tensor) -> Tensor:
        """Return the output unchanged (`DividedRow.leave`)."""
        return out

    def heads_of(self, per_head: Tensor) -> Tensor:
        """Return all entries, because each rank has all heads (`DividedRow.heads_of`)."""
        return per_head

    def _with_prefixes(self, tensor: Tensor) -> Tensor:
        parts = tensor.split(self.lengths, dim=2)
        return torch.cat([parts[part] for chain in self._chains for part in chain], dim=2)


class _Spread(torch.autograd.Function):
    """Repeat scores in the forward pass. In the backward pass, sum a score's gradients in the order of its positions.

    On a GPU, plain indexing sums gradients in any order, so the last bits of updates would vary.
    """

    @staticmethod
    def forward(ctx: Any, scores_K: Tensor, score_N: Tensor) -> Tensor:
        ctx.save_for_backward(score_N)
        ctx.num_scores = len(scores_K)
        return scores_K.index_select(0, score_N)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Any, ...]:
        (score_N,) = ctx.saved_tensors
        ordered_N, order_N = score_N.sort(stable=True)
        ends = torch.searchsorted(ordered_N, torch.arange(ctx.num_scores + 1, device=ordered_N.device))
        return torch.segment_reduce(gradient_N.index_select(0, order_N), "sum", offsets=ends, axis=0), None


def spread(scores_K: Tensor, score_N: Tensor) -> Tensor:
    """Return the score of each position, `[N, ...]`, with a gradient that is reproducible bit for bit.

    Args:
        scores_K: `[K, ...]`, scores of tokens, which several rows may share.
        score_N: `[N]` int64, index of the score of each position. Every score has a position.
    """
    spread_N: Tensor = _Spread.apply(scores_K, score_N)
    return spread_N


@dataclass(frozen=True)
class SharedLayout:
    """The locations of the rows' tokens in the layout."""

    model_inputs: dict[str, Any]
    """Keyword arguments of the model, as for a packed row, with `divided_row` instead of the rows' bounds."""
    places_BT: Tensor
    """Index in the layout of each token of each row. 0 on padding."""
    num_tokens: int
    """Number of tokens of all parts, before rounding."""

    def places(self, row_K: Tensor, column_K: Tensor) -> Tensor:
        """Return the indices in the layout of the given tokens of rows."""
        return self.places_BT[row_K, column_K]


@dataclass(frozen=True)
class _Neighbours:
    """A part of the layout, which consists of consecutive tokens of one or several rows."""

    row: int
    """A row that contains these tokens."""
    start: int
    """Column of the first token in the row."""
    stop: int
    """Column after the last token in the row."""
    parent: int | None
    """Index of the part before these tokens. None if rows begin with them."""


def share_prefixes(input_ids: Tensor, lengths: Sequence[int], prefixes: Prefixes, round_to: int) -> SharedLayout:
    """Lay out the rows of a microbatch: first the nodes of their tree, then each row's own part, fewest keys first.

    In this order, parts of equal length are adjacent, so that one kernel call computes them.

    Args:
        input_ids: `[b, T]` int64, right padded.
        prefixes: Tree of all rows.
        round_to: The layout is rounded up to a multiple of this number, by a part that no row attends to.
    """
    parts, of_row = _parts(lengths, prefixes)
    starts = list(accumulate((part.stop - part.start for part in parts), initial=0))
    places_BT = torch.zeros_like(input_ids)
    for row, number in enumerate(of_row):
        while number is not None:
            part = parts[number]
            places_BT[row, part.start : part.stop] = torch.arange(starts[number], starts[number + 1])
            number = parts[number].parent
    ids = [input_ids[part.row, part.start : part.stop] for part in parts]
    positions = [torch.arange(part.start, part.stop) for part in parts]
    parents = [part.parent for part in parts]
    num_tokens = starts[-1]
    if filler := -num_tokens % round_to:
        ids.append(input_ids.new_zeros(filler))
        positions.append(torch.arange(filler))
        parents.append(None)
    model_inputs = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "divided_row": SharedPrefixes([len(part) for part in ids], parents),
    }
    return SharedLayout(model_inputs, places_BT, num_tokens)


def _parts(lengths: Sequence[int], prefixes: Prefixes) -> tuple[list[_Neighbours], list[int | None]]:
    """Return the parts in layout order, and the index of each row's own part."""
    nodes = prefixes.nodes
    parts: list[_Neighbours] = []
    number_of: dict[int, int | None] = {0: None}
    for node in sorted(range(1, len(nodes)), key=lambda node: (nodes[node].depth, nodes[node].first)):
        depth, parent, first = nodes[node]
        number_of[node] = len(parts)
        parts.append(_Neighbours(prefixes.rows[first], nodes[parent].depth, depth, number_of[parent]))
    of_row: list[int | None] = [None] * len(lengths)
    node_of = dict(zip(prefixes.rows, prefixes.node_of_place, strict=True))
    for row in sorted(range(len(lengths)), key=lambda row: (nodes[node_of[row]].depth, lengths[row], row)):
        of_row[row] = len(parts)
        parts.append(_Neighbours(row, nodes[node_of[row]].depth, lengths[row], number_of[node_of[row]]))
    return parts, of_row
