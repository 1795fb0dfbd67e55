"""Lay out a prompt once for all rows of a packed microbatch that begin with it.

    row 0: prompt a, answer        packed:  a, answer, a, answer, b, answer
    row 1: prompt a, answer   ─►
    row 2: prompt b, answer        shared:  a, own part of row 0, own part of row 1, row 2

All operations but attention treat tokens one by one, and a token's hidden state depends only on the tokens before it.
So the samples of a group need their prompt once: 16 answers as long as their prompt take 17 parts instead of 32. Only
attention sees whole rows: its keys have the prompt in front of each own part. Invariant: scores and gradients equal
those of separate rows, except for the last digits, because sums have another order. `data.packing.families` finds the
rows that share a prompt.

Source: Prefix Grouper (Liu et al. 2025, arXiv:2506.05433).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.packing import Family
from nemo_rl.models.attention.plan import AttentionPlan, Piece


class SharedPrompts:
    """The `DividedRow` of this layout: attention's keys have the prompt in front of each row's own part.

    Args:
        lengths: tokens of each part of the layout; their sum is its length.
        prompts: for each part, the part in front of its keys; None for prompts and for rows that share no prompt.
    """

    def __init__(self, lengths: Sequence[int], prompts: Sequence[int | None]) -> None:
        self._lengths, self._parts = list(lengths), list(enumerate(prompts))
        before = [0 if prompt is None else lengths[prompt] for prompt in prompts]
        queries = pairwise(accumulate(lengths, initial=0))
        keys = pairwise(accumulate(map(sum, zip(before, lengths, strict=True)), initial=0))
        self.plan = AttentionPlan([Piece(*query, *key) for query, key in zip(queries, keys, strict=True)])

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DividedRow`."""
        return query, self._with_prompts(key), self._with_prompts(value)

    def leave(self, out: Tensor) -> Tensor:
        """See `DividedRow`."""
        return out

    def heads_of(self, per_head: Tensor) -> Tensor:
        """See `DividedRow`."""
        return per_head

    def _with_prompts(self, tensor: Tensor) -> Tensor:
        parts = tensor.split(self._lengths, dim=2)
        laid_out = [[parts[part]] if prompt is None else [parts[prompt], parts[part]] for part, prompt in self._parts]
        return torch.cat([tokens for run in laid_out for tokens in run], dim=2)


@dataclass(frozen=True)
class SharedLayout:
    """The places of the rows' tokens.

    Attributes:
        model_inputs: keyword arguments of the model, as for a packed row, with `divided_row` instead of its bounds.
        shared_B: tokens of each row that lie in its family's prompt.
        prompt_B: start of the prompt.
        own_B: start that the row would have if its prompt lay directly in front of its own part.
        num_tokens: tokens of all parts, without the rounding.
    """

    model_inputs: dict[str, Any]
    shared_B: Tensor
    prompt_B: Tensor
    own_B: Tensor
    num_tokens: int

    def places(self, row_K: Tensor, column_K: Tensor) -> Tensor:
        """Return the places of the rows' tokens in the layout."""
        in_prompt = column_K < self.shared_B[row_K]
        return torch.where(in_prompt, self.prompt_B[row_K], self.own_B[row_K]) + column_K


def share_prompts(input_ids: Tensor, lengths: Sequence[int], families: Sequence[Family], round_to: int) -> SharedLayout:
    """Lay out the rows of a microbatch: first the prompts, then each row's own part, shortest keys first.

    In this order parts of one length are neighbours, and one kernel call computes them.

    Args:
        input_ids: `[b, T]` int64, right padded.
        lengths: tokens of each row.
        families: families of rows; every row is in one of them.
        round_to: the layout is rounded up to a multiple of this many tokens, by a part that nothing attends to.
    """
    prompts = sorted((family for family in families if family.shared), key=lambda family: family.shared)
    shared, prompt_starts, own_starts = ([0] * len(lengths) for _ in range(3))
    number_of: dict[int, int] = {}
    parts: list[tuple[Tensor, int, int | None]] = []
    start = 0
    for number, family in enumerate(prompts):
        parts.append((input_ids[family.rows[0], : family.shared], 0, None))
        for row in family.rows:
            shared[row], prompt_starts[row], number_of[row] = family.shared, start, number
        start += family.shared
    for row in sorted(range(len(lengths)), key=lambda row: (shared[row], lengths[row], row)):
        parts.append((input_ids[row, shared[row] : lengths[row]], shared[row], number_of.get(row)))
        own_starts[row] = start - shared[row]
        start += lengths[row] - shared[row]
    if filler := -start % round_to:
        parts.append((input_ids.new_zeros(filler), 0, None))
    ids, before, prompt_of = zip(*parts, strict=True)
    positions = [torch.arange(first, first + len(part)) for part, first in zip(ids, before, strict=True)]
    model_inputs = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "divided_row": SharedPrompts([len(part) for part in ids], prompt_of),
    }
    shared_B, prompt_B, own_B = (torch.tensor(of_rows) for of_rows in (shared, prompt_starts, own_starts))
    return SharedLayout(model_inputs, shared_B, prompt_B, own_B, start)
