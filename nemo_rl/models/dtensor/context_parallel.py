"""Context parallelism: the ranks of a group divide the tokens of each row.

Everything but attention treats tokens one by one, so each rank runs the model on its own; attention sees the whole
row, by one of two methods:

* `all_gather`: keys and values of all ranks are gathered; a rank computes its own queries. Any number of heads.
* `ulysses`: tokens are exchanged for heads (Jacobs et al. 2023, arXiv:2309.14509); a rank computes all queries of its
  share of the heads.

A row is cut into `2 * cp` chunks and rank r takes chunks r and `2 * cp - 1 - r`, so that causal attention is as much
work on every rank (Llama 3, arXiv:2407.21783, section 3.3.2). Invariant: ranks that divide a row hold the gradient of
their own tokens, so gradients are summed over them as over data-parallel ranks; scores leave as those of whole rows.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl.distributed.collectives import all_gather, all_reduce, all_to_all
from nemo_rl.models.dtensor.attention.function import DividedRow
from nemo_rl.models.dtensor.attention.plan import AttentionPlan, Piece
from nemo_rl.models.inputs import ModelInputs
from nemo_rl.utils.errors import ConfigError

_OF_WHOLE_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class Chunks:
    """How a row is cut: which two chunks each rank has.

    Attributes:
        ranks: ranks that divide the row.
        rank: this one.
    """

    ranks: int
    rank: int

    @property
    def count(self) -> int:
        """Chunks of a row."""
        return 2 * self.ranks

    @property
    def mine(self) -> tuple[int, int]:
        """This rank's chunks, the earlier first."""
        return self.rank, self.count - 1 - self.rank

    @property
    def by_rank(self) -> list[int]:
        """All chunks in the order of the ranks that have them."""
        return [chunk for rank in range(self.ranks) for chunk in (rank, self.count - 1 - rank)]

    def take(self, rows: Tensor) -> Tensor:
        """This rank's tokens `[b, t]` of `[b, T]`."""
        parts = rows.chunk(self.count, dim=1)
        return torch.cat([parts[chunk] for chunk in self.mine], dim=1)

    def to_row(self, x: Tensor, dim: int) -> Tensor:
        """From the order of the ranks to that of the row."""
        parts, order = x.chunk(self.count, dim), self.by_rank
        return torch.cat([parts[order.index(chunk)] for chunk in range(self.count)], dim)

    def to_ranks(self, x: Tensor, dim: int) -> Tensor:
        """From the order of the row to that of the ranks."""
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[chunk] for chunk in self.by_rank], dim)

    def pieces(self, edges: list[int]) -> list[Piece]:
        """What this rank's queries see of the whole row's keys.

        Args:
            edges: where the row's segments begin, and its end.
        """
        length, pieces, place = edges[-1] // self.count, list[Piece](), 0
        for chunk in self.mine:
            for start, stop in pairwise(edges):
                first, last = max(start, chunk * length), min(stop, (chunk + 1) * length)
                if first < last:
                    pieces.append(Piece(place, place + last - first, start, last))
                    place += last - first
        return pieces


@dataclass(frozen=True)
class OwnTokens:
    """What a rank's forward needs of a microbatch.

    Attributes:
        inputs: its tokens, and what of them is scored.
        places: which of the microbatch's K scores are its own.
        num_scores: K.
    """

    inputs: ModelInputs
    places: Tensor
    num_scores: int


class ContextParallel:
    """One rank's part of the rows.

    Args:
        mesh: one axis, the ranks that divide the same rows.
        method: `all_gather` or `ulysses`.
    """

    def __init__(self, mesh: DeviceMesh, method: str) -> None:
        self._group = mesh.get_group()
        self._chunks = Chunks(mesh.size(), mesh.get_local_rank())
        self._method = method

    def divide(self, inputs: ModelInputs) -> OwnTokens:
        """Keep this rank's tokens.

        Args:
            inputs: the microbatch, equal on all ranks; its rows are a multiple of `2 * cp` tokens long.

        Raises:
            ConfigError: the rows are not.
        """
        tokens = inputs.model_inputs["input_ids"]
        num_rows, length = tokens.shape
        if length % self._chunks.count:
            raise ConfigError(
                f"rows of {length} tokens do not divide into {self._chunks.count} equal chunks, two for each of "
                f"{self._chunks.ranks} context-parallel ranks. Set policy.make_sequence_length_divisible_by to a "
                f"multiple of {self._chunks.count}."
            )
        whole = {key: value for key, value in inputs.model_inputs.items() if key not in _OF_WHOLE_ROWS}
        whole.setdefault("position_ids", torch.arange(length, device=tokens.device).expand(num_rows, length))
        bounds = inputs.model_inputs.get("cu_seq_lens_q")
        row = self._divided_row([0, length] if bounds is None else bounds.tolist())
        own = {key: self._chunks.take(value) for key, value in whole.items()}
        positions_K, is_own = self._own_positions(inputs.positions_K, length)
        places = is_own.nonzero()[:, 0]
        mine = replace(
            inputs,
            model_inputs=own | {"divided_row": row},
            positions_K=positions_K[places],
            targets_K=inputs.targets_K[places],
        )
        return OwnTokens(mine, places, len(inputs.positions_K))

    def collect(self, own: OwnTokens, values: Tensor) -> Tensor:
        """All ranks' values `[K, ...]` of a microbatch, on every rank; the gradient is that of the rank's own."""
        whole = values.new_zeros((own.num_scores, *values.shape[1:])).index_copy(0, own.places, values)
        return all_reduce(whole, self._group)

    def join(self, hidden_tD: Tensor) -> Tensor:
        """`[T, D]` of one row from every rank's own tokens; not differentiable."""
        return self._chunks.to_row(all_gather(hidden_tD, 0, self._group, partial_gradient=False), 0)

    def _own_positions(self, positions_K: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Places of tokens among this rank's own, and which of them it has."""
        chunk_length = length // self._chunks.count
        row_K, place_K = positions_K // length, positions_K % length
        chunk_K, offset_K = place_K // chunk_length, place_K % chunk_length
        early, late = self._chunks.mine
        local_K = row_K * 2 * chunk_length + offset_K + (chunk_K == late) * chunk_length
        return local_K, (chunk_K == early) | (chunk_K == late)

    def _divided_row(self, edges: list[int]) -> DividedRow:
        kind = _GatheredRow if self._method == "all_gather" else _ExchangedRow
        return kind(self._chunks, self._group, edges)


class _GatheredRow:
    """Own queries, everybody's keys and values."""

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup, edges: list[int]) -> None:
        self.plan = AttentionPlan(chunks.pieces(edges))
        self._chunks, self._group = chunks, group

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DividedRow`; one collective for keys and values."""
        both = all_gather(torch.cat([key, value], dim=-1), 2, self._group, partial_gradient=True)
        key, value = self._chunks.to_row(both, 2).split([key.shape[-1], value.shape[-1]], dim=-1)
        return query, key, value

    def leave(self, out: Tensor) -> Tensor:
        """See `DividedRow`."""
        return out

    def heads_of(self, per_head: Tensor) -> Tensor:
        """See `DividedRow`."""
        return per_head


class _ExchangedRow:
    """All tokens, this rank's heads. Fewer key heads than ranks are repeated, as grouped queries share them anyway."""

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup, edges: list[int]) -> None:
        self.plan = AttentionPlan([Piece(start, stop, start, stop) for start, stop in pairwise(edges)])
        self._chunks, self._group = chunks, group

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DividedRow`.

        Raises:
            ConfigError: the heads do not divide over the ranks.
        """
        heads, key_heads, ranks = query.shape[1], key.shape[1], self._chunks.ranks
        if heads % ranks:
            raise ConfigError(
                f"policy.dtensor_cfg.context_parallel_method=ulysses divides the {heads} attention heads of a rank "
                f"over {ranks} context-parallel ranks, and {heads} is no multiple of {ranks}. Use context_parallel_size="
                f"{max(n for n in range(1, ranks) if heads % n == 0)} or context_parallel_method=all_gather."
            )
        copies = lcm(key_heads, ranks) // key_heads
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def leave(self, out: Tensor) -> Tensor:
        """See `DividedRow`."""
        ranks = self._chunks.ranks
        sent = self._chunks.to_ranks(out, 2).unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)
        return self._exchanged(sent).transpose(0, 1)

    def heads_of(self, per_head: Tensor) -> Tensor:
        """See `DividedRow`."""
        return per_head.chunk(self._chunks.ranks)[self._chunks.rank]

    def _to_heads(self, x: Tensor) -> Tensor:
        """`[b, H, t, D]` of own tokens to `[b, H / cp, T, D]` of own heads."""
        got = self._exchanged(x.transpose(0, 1)).unflatten(0, (self._chunks.ranks, -1))
        return self._chunks.to_row(got.permute(2, 1, 0, 3, 4).flatten(2, 3), 2)

    def _exchanged(self, x: Tensor) -> Tensor:
        each: Any = [len(x) // self._chunks.ranks] * self._chunks.ranks
        return all_to_all(x, each, each, self._group)
