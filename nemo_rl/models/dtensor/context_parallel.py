"""Implement context parallelism, in which the ranks of a group divide the tokens of each row.

Only attention and recurrent layers combine tokens, so a rank runs the rest on its own tokens. Attention sees whole
rows, by two methods:

* `all_gather`: each rank gathers all keys and values, and attends with its own queries. Allows any number of heads.
* `ulysses`: the ranks exchange tokens for heads (Jacobs et al. 2023, arXiv:2309.14509), and each rank computes
  attention for all tokens in its share of the heads.

Recurrent layers always exchange tokens for heads (`huggingface.recurrent`).

A row is cut into `2 * cp` chunks, two for each rank. The chunk with the most work is paired with the chunk with the
least work. For one long sequence these are chunks r and `2 * cp - 1 - r`, as in Llama 3 (arXiv:2407.21783, section
3.3.2). Invariant: each rank computes the gradient of its own tokens only, so gradients are summed over these ranks as
over data-parallel ranks. The scores that this module returns are those of whole rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl.distributed.ranks.collectives import all_gather, all_reduce, all_to_all
from nemo_rl.host.device import to_device
from nemo_rl.models.attention.plan import AttentionPlan, Piece
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import ForwardStep
from nemo_rl.utils.errors import ConfigError

_OF_WHOLE_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class Chunks:
    """Division of a row into chunks, two for each rank."""

    rank: int
    """Index of this rank."""
    by_rank: Sequence[int]
    """All chunks, two for each rank, in the order of the ranks."""
    edges: Sequence[int]
    """Starts of the row's segments, and the end of the row."""

    @classmethod
    def balanced(cls, edges: Sequence[int], ranks: int, rank: int) -> "Chunks":
        """Pair the chunk of most work with the chunk of least work, and so on, so that ranks have similar work."""
        work = [sum(p.work for p in _pieces(edges, 2 * ranks, chunk, 0)) for chunk in range(2 * ranks)]
        lightest_first = sorted(range(2 * ranks), key=lambda chunk: work[chunk])
        pairs = (sorted((lightest_first[i], lightest_first[-1 - i])) for i in range(ranks))
        return cls(rank, [chunk for pair in pairs for chunk in pair], edges)

    @property
    def count(self) -> int:
        """Number of chunks of a row, two for each rank."""
        return len(self.by_rank)

    @property
    def mine(self) -> Sequence[int]:
        """This rank's chunks, the earlier one first."""
        return self.by_rank[2 * self.rank : 2 * self.rank + 2]

    @property
    def pieces(self) -> list[Piece]:
        """Pieces of attention of this rank's queries, with the keys of the whole row."""
        length = self.edges[-1] // self.count
        early, late = self.mine
        return [*_pieces(self.edges, self.count, early, 0), *_pieces(self.edges, self.count, late, length)]

    def take(self, rows: Tensor) -> Tensor:
        """Return this rank's tokens `[b, t]` of `[b, T]`."""
        parts = rows.chunk(self.count, dim=1)
        return torch.cat([parts[chunk] for chunk in self.mine], dim=1)

    def own(self, positions_K: Tensor) -> tuple[Tensor, Tensor]:
        """Convert positions in flattened `[b, T]` rows to positions in this rank's flattened `[b, t]` rows.

        Args:
            positions_K: `[K]` positions in the whole rows.

        Returns:
            `[K]` positions in this rank's rows, and a `[K]` bool mask of the positions that this rank holds.
        """
        length = self.edges[-1] // self.count
        row_K, place_K = positions_K // self.edges[-1], positions_K % self.edges[-1]
        chunk_K, offset_K = place_K // length, place_K % length
        early, late = self.mine
        own_K = row_K * 2 * length + (chunk_K == late) * length + offset_K
        return own_K, (chunk_K == early) | (chunk_K == late)

    def to_row(self, x: Tensor, dim: int) -> Tensor:
        """Reorder chunks from the order of the ranks to the order of the row."""
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[self.by_rank.index(chunk)] for chunk in range(self.count)], dim)

    def to_ranks(self, x: Tensor, dim: int) -> Tensor:
        """Reorder chunks from the order of the row to the order of the ranks."""
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[chunk] for chunk in self.by_rank], dim)


def _pieces(edges: Sequence[int], count: int, chunk: int, place: int) -> list[Piece]:
    """Cut chunk `chunk` of `count` chunks at the boundaries of sequences. `place` is the index of its first query."""
    length = edges[-1] // count
    begin, end = chunk * length, (chunk + 1) * length
    met = [
        (start, max(start, begin), min(stop, end)) for start, stop in pairwise(edges) if start < end and begin < stop
    ]
    return [Piece(place + first - begin, place + last - begin, start, last) for start, first, last in met]


@dataclass(frozen=True)
class OwnTokens:
    """One rank's tokens of a microbatch."""

    inputs: ModelInputs
    """The rank's tokens, positions and targets."""
    places: Tensor
    """Indices of the rank's scores among the microbatch's K scores."""
    num_scores: int
    """Number K of scores of the whole microbatch."""


class ContextParallel:
    """Selects this rank's tokens of each row, and collects the scores of all ranks.

    Args:
        mesh: mesh with one axis, the ranks that divide the same rows.
        method: `all_gather` or `ulysses`.
    """

    def __init__(self, mesh: DeviceMesh, method: str) -> None:
        self._group, self._ranks, self._rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self._row = _GatheredRow if method == "all_gather" else _ExchangedRow
        self._chunks: Chunks | None = None

    def divide(self, inputs: ModelInputs) -> OwnTokens:
        """Return this rank's tokens of a microbatch.

        Args:
            inputs: the microbatch, equal on all ranks; the length of its rows is a multiple of `2 * cp` tokens.

        Raises:
            ConfigError: the length of the rows is not a multiple of `2 * cp`.
        """
        tokens = inputs.model_inputs["input_ids"]
        num_rows, length = tokens.shape
        if length % (2 * self._ranks):
            raise ConfigError(
                f"rows of {length} tokens do not divide into {2 * self._ranks} equal chunks, two for each of "
                f"{self._ranks} context-parallel ranks. Set policy.make_sequence_length_divisible_by to a multiple of "
                f"{2 * self._ranks}."
            )
        whole = {key: value for key, value in inputs.model_inputs.items() if key not in _OF_WHOLE_ROWS}
        whole.setdefault("position_ids", torch.arange(length, device=tokens.device).expand(num_rows, length))
        bounds = inputs.model_inputs.get("cu_seq_lens_q")
        self._chunks = chunks = Chunks.balanced(
            [0, length] if bounds is None else bounds.tolist(), self._ranks, self._rank
        )
        own = {key: chunks.take(value) for key, value in whole.items()}
        positions_K, is_own = chunks.own(inputs.positions_K.cpu())  # on a GPU, `nonzero` would wait as long
        mine_k = is_own.nonzero()[:, 0]
        places = to_device(mine_k, tokens.device)
        mine = replace(
            inputs,
            model_inputs=own | {"divided_row": self._row(chunks, self._group)},
            positions_K=to_device(positions_K[mine_k], tokens.device),
            targets_K=inputs.targets_K.index_select(0, places),
            real_tokens=None if inputs.real_tokens is None else chunks.take(inputs.real_tokens),
            routed_experts=None if inputs.routed_experts is None else chunks.take(inputs.routed_experts),
        )
        return OwnTokens(mine, places, len(inputs.positions_K))

    def divided(
        self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep
    ) -> tuple[list[ModelInputs], ForwardStep]:
        """Return this rank's tokens of all microbatches, and a `forward_step` that gets scores of whole rows."""
        owned = [self.divide(inputs) for inputs in microbatches]

        def step(index: int, first: Tensor, second: Tensor) -> Tensor | None:
            return forward_step(index, self.collect(owned[index], first), self.collect(owned[index], second))

        return [own.inputs for own in owned], step

    def collect(self, own: OwnTokens, values: Tensor) -> Tensor:
        """Collect the values `[K, ...]` of all ranks for a microbatch. Only the rank's own values have a gradient."""
        whole = values.new_zeros((own.num_scores, *values.shape[1:])).index_copy(0, own.places, values)
        return all_reduce(whole, self._group)

    def join(self, hidden_tD: Tensor) -> Tensor:
        """Gather the hidden states `[T, D]` of the last divided row from all ranks, without gradients."""
        assert self._chunks is not None, "nothing has been divided"
        return self._chunks.to_row(all_gather(hidden_tD, 0, self._group, partial_gradient=False), 0)


class TokenExchange:
    """Exchange of tokens for heads: the `RowExchange` of a row that ranks divide.

    Args:
        chunks: the division of the row.
        group: the ranks. None in a test with one process.
    """

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup | None) -> None:
        self._chunks, self._group, self.ranks = chunks, group, chunks.count // 2
        self.cu_seq_lens = torch.tensor(chunks.edges, dtype=torch.int32)

    def to_heads(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        """Exchange this rank's tokens for its heads (`RowExchange.to_heads`).

        Raises:
            ConfigError: the ranks do not divide the heads.
        """
        if x.shape[heads] % self.ranks:
            raise ConfigError(
                f"{self.ranks} context-parallel ranks do not divide the {x.shape[heads]} heads or channels of a "
                "recurrent layer on a rank. Set policy.dtensor_cfg.context_parallel_size=1."
            )
        places = (heads % x.dim(), tokens % x.dim())
        got = self._exchanged(x.movedim(places, (0, 1))).unflatten(0, (self.ranks, -1))
        return self._chunks.to_row(got.movedim(0, 1).flatten(1, 2), 1).movedim((0, 1), places).contiguous()

    def to_tokens(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        """Exchange this rank's heads for its tokens (`RowExchange.to_tokens`)."""
        places = (heads % x.dim(), tokens % x.dim())
        sent = self._chunks.to_ranks(x.movedim(places, (0, 1)), 1).unflatten(1, (self.ranks, -1))
        return self._exchanged(sent.movedim(1, 0).flatten(0, 1)).movedim((0, 1), places).contiguous()

    def gathered(self, x: Tensor, tokens: int) -> Tensor:
        """Gather the tokens of all ranks (`RowExchange.gathered`)."""
        tokens %= x.dim()
        return self._chunks.to_row(all_gather(x, tokens, self._group, partial_gradient=True), tokens)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Select the entries of this rank's heads (`RowExchange.own_heads`)."""
        return per_head.chunk(self.ranks)[self._chunks.rank]

    def _exchanged(self, x: Tensor) -> Tensor:
        each = [len(x) // self.ranks] * self.ranks
        return all_to_all(x, each, each, self._group)


class _GatheredRow:
    """The `DividedRow` of `all_gather`: this rank's queries with the keys and values of all ranks."""

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.plan = AttentionPlan(chunks.pieces)
        self.exchange = TokenExchange(chunks, group)
        self._chunks, self._group = chunks, group

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather keys and values of all ranks in one collective call (`DividedRow.enter`)."""
        both = all_gather(torch.cat([key, value], dim=-1), 2, self._group, partial_gradient=True)
        key, value = self._chunks.to_row(both, 2).split([key.shape[-1], value.shape[-1]], dim=-1)
        return query, key, value

    def leave(self, out: Tensor) -> Tensor:
        """Return the output unchanged, because each rank has its own queries (`DividedRow.leave`)."""
        return out

    def heads_of(self, per_head: Tensor) -> Tensor:
        """Return all entries, because each rank has all heads (`DividedRow.heads_of`)."""
        return per_head


class _ExchangedRow:
    """The `DividedRow` of `ulysses`: all tokens, with this rank's heads only.

    Key heads are repeated if ranks do not divide their number. Query heads share them, so results stay equal.
    """

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.plan = AttentionPlan([Piece(start, stop, start, stop) for start, stop in pairwise(chunks.edges)])
        self.exchange = TokenExchange(chunks, group)
        self._ranks = self.exchange.ranks

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens for its heads (`DividedRow.enter`)."""
        heads, key_heads, ranks = query.shape[1], key.shape[1], self._ranks
        if heads % ranks:
            raise ConfigError(
                f"policy.dtensor_cfg.context_parallel_method=ulysses divides the {heads} attention heads of a rank "
                f"over {ranks} context-parallel ranks, and {heads} is no multiple of {ranks}. Use "
                f"context_parallel_size={max(n for n in range(1, ranks) if heads % n == 0)} or "
                "context_parallel_method=all_gather."
            )
        copies = lcm(key_heads, ranks) // key_heads
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, x: Tensor) -> Tensor:
        return self.exchange.to_heads(x, tokens=2, heads=1)

    def leave(self, out: Tensor) -> Tensor:
        """Exchange this rank's heads for its tokens (`DividedRow.leave`)."""
        return self.exchange.to_tokens(out, tokens=2, heads=1)

    def heads_of(self, per_head: Tensor) -> Tensor:
        """Select the entries of this rank's heads (`DividedRow.heads_of`)."""
        return self.exchange.own_heads(per_head)
