"""Divide sequences among context-parallel ranks in Megatron Core's order.

Each sequence of `L` tokens is cut into `2 * cp` chunks; rank r has chunks r and `2 * cp - 1 - r`, so that all ranks
have the same work under a causal mask (`megatron.core.utils.get_batch_on_this_cp_rank`). Packed sequences are cut
separately. Invariant: `plan` and `order` describe the same whole row; selecting gathered keys by `order` gives that
row's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.models.attention import AttentionPlan, Piece

_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache of rows by the tensor of their boundaries, which is the same for all layers of a microbatch."""


@dataclass(frozen=True)
class DividedRow:
    """Attention plan and token order of a row that context-parallel ranks divide, for one rank."""

    plan: AttentionPlan
    """The keys of the whole row that this rank's queries see."""
    order: Tensor
    """`[T]` int64, index of each token of the row in the parts of all ranks, laid out rank after rank."""

    def gather(self, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Gather keys `[b, H, t, D]` and values `[b, H, t, D_v]` of all ranks to the whole row, in one collective."""
        both = all_gather(torch.cat([key, value], dim=-1), 2, group, partial_gradient=True)
        whole_key, whole_value = both.index_select(2, self.order).split([key.shape[-1], value.shape[-1]], dim=-1)
        return whole_key, whole_value


@lru_cache(maxsize=16)
def divided_row(length: int, ranks: int, rank: int, device: torch.device) -> DividedRow:
    """Divide a row that is one sequence of `length` tokens on all ranks together."""
    return _divide([0, length], ranks, rank, device)


def divided_sequences(bounds: Tensor, ranks: int, rank: int) -> DividedRow:
    """Divide a row of packed sequences.

    Args:
        bounds: `[S + 1]` int32, start of each sequence in the whole row, and the end of the last.
        ranks: number of context-parallel ranks.
        rank: this rank among them.
    """
    if bounds not in _PACKED:
        _PACKED[bounds] = _divide(bounds.tolist(), ranks, rank, bounds.device)
    row: DividedRow = _PACKED[bounds]
    return row


def _divide(bounds: Sequence[int], ranks: int, rank: int, device: torch.device) -> DividedRow:
    pieces, order = [], []
    for start, stop in pairwise(bounds):
        length = (stop - start) // (2 * ranks)
        assert length * 2 * ranks == stop - start, f"a sequence of {stop - start} tokens over {ranks} ranks"
        place = start // ranks
        for chunk, begin in ((rank, place), (2 * ranks - 1 - rank, place + length)):
            pieces.append(Piece(begin, begin + length, start, start + (chunk + 1) * length))
        for chunk in range(2 * ranks):
            owner = min(chunk, 2 * ranks - 1 - chunk)
            begin = owner * (bounds[-1] // ranks) + place + (chunk >= ranks) * length
            order.append(torch.arange(begin, begin + length))
    return DividedRow(AttentionPlan(pieces), torch.cat(order).to(device))
