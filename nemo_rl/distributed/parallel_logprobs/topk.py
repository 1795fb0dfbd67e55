"""Find the largest logits of each token, for distillation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.distributed.parallel_logprobs.head import PLAIN, LogitTransform, OutputHead, default_chunk_size, widen
from nemo_rl.distributed.ranks.collectives import Group, all_gather


@dataclass(frozen=True)
class TopK:
    """Number and range of the logits to keep of each token."""

    k: int
    """Number of logits, the largest ones."""
    vocab_size: int | None = None
    """Only ids below it are considered, for output heads with rows beyond the vocabulary; None: all ids."""


@torch.no_grad()
def topk_logits(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    top: TopK,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    group: Group = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token and their ids, largest first; not differentiable.

    Args:
        hidden_ND: `[N, D]` hidden states.
        weight_VD: `[V, D]` output head, or this rank's rows of it.
        top: number of logits and range of ids.
        bias_V: `[V]` bias of these rows.
        transform: function that the model applies to the linear layer's output.
        group: the ranks that divide the head; None: this rank has the whole head.
        chunk_size: tokens per chunk of logits; None takes `default_chunk_size`.

    Returns:
        `(logits_Nk, ids_Nk)`: float32 (float64 for float64 inputs) at temperature 1, and int64. The ids are those of
        the whole vocabulary, the same as without a group unless two logits of a token are equal.
    """
    head = OutputHead(weight_VD, bias_V, transform, group)
    chunk_size = chunk_size or default_chunk_size(on_gpu=hidden_ND.is_cuda)
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=wide)
    ids_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=torch.int64)
    for start in range(0, hidden_ND.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        x_nV = head.logits(hidden_ND[part])
        logits_Nk[part], ids_Nk[part] = topk_of(x_nV, top) if group is None else _topk_of_all(x_nV, top, head)
    return logits_Nk, ids_Nk


def topk_of(logits_NV: Tensor, top: TopK) -> tuple[Tensor, Tensor]:
    """Compute `topk_logits` from existing logits; in their dtype, float32 at least."""
    logits_Nk, ids_Nk = widen(logits_NV[:, : top.vocab_size]).topk(top.k, dim=-1)
    return logits_Nk, ids_Nk


def _topk_of_all(x_nV: Tensor, top: TopK, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Return the k largest among every rank's k largest logits; a rank with fewer ids pads with -inf."""
    assert head.group is not None
    num_here = x_nV.shape[1]
    num_ids = num_here * head.group.size()
    if top.vocab_size is not None:
        num_ids = min(num_ids, top.vocab_size)
        num_here = min(max(top.vocab_size - head.first_id, 0), num_here)
    assert top.k <= num_ids, f"the {top.k} largest of {num_ids} logits"
    kept = min(top.k, num_here)
    logits_nk, columns_nk = x_nV[:, :num_here].topk(kept, dim=-1)
    missing = (0, top.k - kept)
    of_all = [
        all_gather(candidates, 1, head.group, partial_gradient=False)
        for candidates in (F.pad(logits_nk, missing, value=-math.inf), F.pad(columns_nk + head.first_id, missing))
    ]
    best_nk, where_nk = of_all[0].topk(top.k, dim=-1)
    return best_nk, of_all[1].gather(-1, where_nk)
