"""Convert a microbatch to this rank's inputs for Megatron Core's GPTModel, and find its scored tokens.

Rows are padded (`[b, T]` with causal attention and no mask tensor) or concatenated to a packed row (`thd`).
Context-parallel ranks cut every sequence into `2 cp` equal chunks, and rank r has chunk r and chunk `2 cp - 1 - r`.
Therefore every sequence is padded at its end to a multiple of `2 cp` tokens. No earlier token attends to the padding.

Invariant: each of the K scored tokens is on exactly one context-parallel rank.
Legend: `T` tokens of a row, `t` tokens of a row on this rank, `k` scored tokens on this rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.routed_experts import NOT_REPORTED
from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.host.device import to_device
from nemo_rl.models.training.inputs import ModelInputs, round_up


@dataclass(frozen=True)
class TokenDivision:
    """Division of a row's tokens among ranks."""

    cp: int = 1
    """Number of context-parallel ranks."""
    cp_rank: int = 0
    """This rank's number among the context-parallel ranks."""
    sp: int = 1
    """Number of ranks that divide a context-parallel rank's tokens between layers (sequence parallelism)."""
    sp_rank: int = 0
    """This rank's number among the ranks of sequence parallelism."""

    @property
    def of_sequence(self) -> int:
        """Number by which the length of every sequence must be divisible."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def of_row(self) -> int:
        """Number by which the length of every row must be divisible."""
        return math.lcm(self.of_sequence, self.cp * self.sp)


@dataclass(frozen=True)
class FurtherTokens:
    """The tokens that one multi-token-prediction layer predicts."""

    positions_n: Tensor
    """Indices in the flattened hidden states `[t, b]` from which the layer makes predictions."""
    targets_n: Tensor
    """Ids of the tokens to predict, int64."""


@dataclass(frozen=True)
class RankInputs:
    """A microbatch on this rank."""

    arguments: dict[str, Any]
    """Keyword arguments of GPTModel."""
    positions_k: Tensor
    """Indices of the scored tokens in the flattened hidden states `[t, b]`."""
    targets_k: Tensor
    """The entries of `ModelInputs.targets_K` for this rank's scored tokens."""
    places_k: Tensor
    """Indices of this rank's scored tokens among the microbatch's K scores."""
    num_scores: int
    """Number K of scored tokens of the whole microbatch."""
    real_tokens: Tensor
    """`[b, t]` bool, False on padding."""
    unfiltered: bool = False
    """Whether to score without top-k and top-p, as in `ModelInputs`."""
    top_k: TopK | None = None
    """Selection of the largest logits, as in `ModelInputs`."""
    routed_experts: Tensor | None = None
    """`[b, t, L, k]` recorded experts of this rank's tokens (`ModelInputs`)."""
    further: tuple[FurtherTokens, ...] = ()
    """The tokens of each multi-token-prediction layer."""

    def between_layers(self, division: TokenDivision) -> Tensor:
        """Return `real_tokens` for the tokens `[b, t / sp]` of this rank between layers."""
        return self.real_tokens.chunk(division.sp, dim=1)[division.sp_rank]

    def experts_between_layers(self, division: TokenDivision) -> Tensor | None:
        """Return `routed_experts` `[b, t / sp, L, k]` for the tokens of this rank between layers, or None."""
        experts = self.routed_experts
        return None if experts is None else experts.chunk(division.sp, dim=1)[division.sp_rank]


def rank_inputs(inputs: ModelInputs, division: TokenDivision, num_further: int = 0) -> RankInputs:
    """Return this rank's part of a microbatch.

    Args:
        inputs: the microbatch, equal on all ranks that divide its tokens or layers.
        division: division of the tokens among ranks.
        num_further: number of multi-token-prediction layers, which predict the scored tokens from earlier positions.
    """
    bounds = inputs.model_inputs.get("cu_seq_lens_q")
    tokens = inputs.model_inputs["input_ids"]
    rows, width = tokens.shape
    device, send = tokens.device, partial(to_device, device=tokens.device)
    scored_K = inputs.positions_K.cpu()  # computing indices on a GPU would mostly wait
    old = [0, width] if bounds is None else bounds.tolist()
    new = _padded_bounds(old, division)
    source_T, own_t = _source_tokens(old, new), _own_tokens(new, division)
    from_t, positions_t = send(source_T[own_t]), (torch.arange(new[-1]) - _starts(new))[own_t]
    real = torch.ones_like(tokens, dtype=torch.bool) if inputs.real_tokens is None else inputs.real_tokens
    positions_k, places_k = _scored(scored_K, width, rows, source_T, own_t)
    sent_places_k = send(places_k)
    arguments: dict[str, Any] = {
        "input_ids": _moved(tokens, from_t),
        "position_ids": send(positions_t).expand(rows, -1),
        "attention_mask": None,
    }
    if bounds is not None:
        arguments["packed_seq_params"] = _packed_parameters(new, device)
    experts = inputs.routed_experts
    further = []
    for depth in range(1, num_further + 1):
        places_n = _further(scored_K, width, old, depth)
        positions_n, held_n = _scored(places_n, width, rows, source_T, own_t)
        targets_n = tokens.flatten().index_select(0, send(places_n[held_n] + depth + 1))
        further.append(FurtherTokens(send(positions_n), targets_n))
    return RankInputs(
        arguments=arguments,
        positions_k=send(positions_k),
        targets_k=inputs.targets_K.index_select(0, sent_places_k),
        places_k=sent_places_k,
        num_scores=len(inputs.positions_K),
        real_tokens=_moved(real, from_t),
        unfiltered=inputs.unfiltered,
        top_k=inputs.top_k,
        routed_experts=None if experts is None else _moved(experts, from_t, NOT_REPORTED),
        further=tuple(further),
    )


def without_scores(inputs: RankInputs) -> RankInputs:
    """Return inputs with the same tokens and without scored tokens."""
    none = {name: getattr(inputs, name)[:0] for name in ("positions_k", "targets_k", "places_k")}
    further = tuple(FurtherTokens(each.positions_n[:0], each.targets_n[:0]) for each in inputs.further)
    return replace(inputs, **none, num_scores=0, unfiltered=False, top_k=None, further=further)


def row_order(num_tokens: int, division: TokenDivision) -> Tensor:
    """Return `[T]`: the index of each token of a row in the concatenated parts of all context-parallel ranks."""
    parts = [_own_tokens([0, num_tokens], TokenDivision(division.cp, rank)) for rank in range(division.cp)]
    return torch.cat(parts).argsort()


def _padded_bounds(bounds: Sequence[int], division: TokenDivision) -> list[int]:
    """Return the bounds of the padded sequences. One more sequence may be added to fill the row."""
    padded = [0]
    for start, stop in pairwise(bounds):
        padded.append(padded[-1] + round_up(stop - start, division.of_sequence))
    total = round_up(padded[-1], division.of_row)
    if total > padded[-1]:
        # The only sequence of a row that is not packed becomes longer; a packed row gets another sequence of padding.
        padded = [*padded, total] if len(bounds) > 2 else [0, total]
    return padded


def _source_tokens(old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return `[T]` int64: the index in the old row of each token of the new row, or -1 for padding."""
    source = torch.full((new[-1],), -1, dtype=torch.int64)
    for (start, stop), begin in zip(pairwise(old), new, strict=False):
        source[begin : begin + stop - start] = torch.arange(start, stop)
    return source


def _own_tokens(bounds: Sequence[int], division: TokenDivision) -> Tensor:
    """Return `[t]` int64: the index in the row of each token of this rank, in the rank's order."""
    if division.cp == 1:
        return torch.arange(bounds[-1])
    mine = (division.cp_rank, 2 * division.cp - 1 - division.cp_rank)
    parts = []
    for start, stop in pairwise(bounds):
        length = (stop - start) // (2 * division.cp)
        parts += [torch.arange(start + chunk * length, start + (chunk + 1) * length) for chunk in mine]
    return torch.cat(parts)


def _moved(rows: Tensor, source_t: Tensor, padding: int = 0) -> Tensor:
    """Return this rank's tokens `[b, t, ...]` of rows `[b, W, ...]`, with `padding` for tokens without a source."""
    moved = rows.index_select(1, source_t.clamp(min=0))
    is_new = (source_t < 0).view(1, -1, *[1] * (rows.dim() - 2))
    return moved.masked_fill(is_new, padding)


def _starts(bounds: Sequence[int]) -> Tensor:
    """Return `[T]`: the index of the first token of each token's sequence."""
    lengths = torch.tensor([stop - start for start, stop in pairwise(bounds)])
    return torch.repeat_interleave(torch.tensor(bounds[:-1]), lengths)


def _scored(positions_K: Tensor, width: int, rows: int, source_T: Tensor, own_t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of this rank's scored tokens in flattened `[t, b]` and among the K scores."""
    place_of = torch.full((width,), -1, dtype=torch.int64)
    source_t = source_T[own_t]
    held = source_t >= 0
    place_of[source_t[held]] = held.nonzero()[:, 0]
    row_K, place_K = positions_K // width, place_of[positions_K % width]
    places_k = (place_K >= 0).nonzero()[:, 0]
    return (place_K * rows + row_K)[places_k], places_k


def _further(positions_K: Tensor, width: int, bounds: Sequence[int], depth: int) -> Tensor:
    """Return the positions `depth` tokens before the scored positions, within the same sequence."""
    before_K = positions_K % width - _starts(bounds)[positions_K % width]
    return positions_K[before_K >= depth] - depth


def _packed_parameters(bounds: Sequence[int], device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cumulative = to_device(torch.tensor(bounds, dtype=torch.int32), device)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        pad_between_seqs=False,
    )
    # Recurrent layers read the sequence of each token from `seq_idx`, and mix the sequences without it. Given
    # `total_tokens`, Megatron Core would compute it on the device, and wait for the device.
    numbers = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    packed.total_tokens, packed.seq_idx = bounds[-1], to_device(numbers[None], device)
    return packed
