"""How context-parallel ranks divide sequences, in Megatron Core's order.

Each sequence of `L` tokens is cut into `2 * cp` chunks; rank r has chunks r and `2 * cp - 1 - r`, so that all ranks
have the same work under a causal mask (`megatron.core.utils.get_batch_on_this_cp_rank`). Of packed sequences each is
cut by itself. Invariant: `plan` and `order` describe the same whole row; keys put into `order` lie as in that row.
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
"""Rows by the tensor of their boundaries: all layers of a microbatch ask with the same one."""


@dataclass(frozen=True)
class DividedRow:
    """What one rank's attention needs of a row that context-parallel ranks divide.

    Attributes:
        plan: which keys of the whole row this rank's queries see.
        order: `[T]` int64, where each token of the row lies among the parts of all ranks, laid out rank after rank.
    """

    plan: AttentionPlan
    order: Tensor

    def gather(self, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Keys `[b, H, t, D]` and values `[b, H, t, D_v]` of this rank to those of the whole row, in one collective."""
        both = all_gather(torch.cat([key, value], dim=-1), 2, group, partial_gradient=True)
        whole_key, whole_value = both.index_select(2, self.order).split([key.shape[-1], value.shape[-1]], dim=-1)
        return whole_key, whole_value


@lru_cache(maxsize=16)
def divided_row(length: int, ranks: int, rank: int, device: torch.device) -> DividedRow:
    """A row that is one sequence of `length` tokens, all ranks' together."""
    return _divide([0, length], ranks, rank, device)


def divided_sequences(bounds: Tensor, ranks: int, rank: int) -> DividedRow:
    """Packed sequences.

    Args:
        bounds: `[S + 1]` int32, where each begins in the whole row.
        ranks: number of context-parallel ranks.
        rank: this one.
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
