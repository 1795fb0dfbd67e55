"""The loss of a draft model: cross-entropy with the policy's distribution over the tokens that it can propose.

    loss_k = -sum_v p_k(v) log q_k(v)        p: softmax of the policy's logits over these tokens; q: the draft model's

A position whose most likely token cannot be proposed does not count. Source: EAGLE-3 (Li et al. 2025,
arXiv:2503.01840). Logits are computed and differentiated chunk by chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_rl.distributed.parallel_logprobs.head import OutputHead, default_chunk_size, widen
from nemo_rl.distributed.ranks.collectives import all_gather


class DraftSums(NamedTuple):
    """Sums over positions, float64 scalars but for the differentiable loss."""

    loss: Tensor
    """Sum of the cross-entropy, float32 or wider."""
    agreeing: Tensor
    """Positions where policy and draft model have the same most likely token."""
    counted: Tensor
    """Positions that count."""


def draft_loss(
    draft_KD: Tensor,
    weight_UD: Tensor,
    hidden_KD: Tensor,
    head: OutputHead,
    vocab_size: int,
    ids_U: Tensor | None,
    chunk_size: int | None = None,
) -> DraftSums:
    """Compare the distributions after K positions; differentiable in the first two arguments.

    Args:
        draft_KD: the draft model's hidden states.
        weight_UD: its output head, for the U tokens that it can propose.
        hidden_KD: the policy's hidden states that predict the same tokens.
        head: the policy's output head; its rows may be more than the tokens.
        vocab_size: number of tokens of the policy.
        ids_U: the policy's id of each of the U tokens; None: they are all tokens, in order.
        chunk_size: positions whose logits are held at a time; None takes `default_chunk_size`.
    """
    size = chunk_size or default_chunk_size(on_gpu=draft_KD.is_cuda)
    # Sums over nothing, so that a backward pass exists on a rank where no position is scored.
    sums = [widen(draft_KD[:0].sum() + weight_UD[:0].sum())]
    counts = [torch.zeros(2, dtype=torch.float64, device=draft_KD.device)]
    for start in range(0, len(draft_KD), size):
        part = slice(start, start + size)
        loss, count = checkpoint(
            _of_chunk, draft_KD[part], weight_UD, hidden_KD[part], head, vocab_size, ids_U, use_reentrant=False
        )
        sums.append(loss)
        counts.append(count)
    agreeing, counted = torch.stack(counts).sum(0)
    return DraftSums(torch.stack(sums).sum(), agreeing, counted)


def _of_chunk(
    draft_nD: Tensor,
    weight_UD: Tensor,
    hidden_nD: Tensor,
    head: OutputHead,
    vocab_size: int,
    ids_U: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target_nV = head.logits(hidden_nD)
        if head.group is not None:
            target_nV = all_gather(target_nV, 1, head.group, partial_gradient=False)
        target_nV = target_nV[:, :vocab_size]
        target_nU = target_nV if ids_U is None else target_nV.index_select(1, ids_U)
        counts_n = target_nU.max(-1).values == target_nV.max(-1).values
    log_q_nU = OutputHead(weight_UD).logits(draft_nD).log_softmax(-1)
    loss_n = -(target_nU.softmax(-1) * log_q_nU).sum(-1)
    agreeing_n = (log_q_nU.argmax(-1) == target_nU.argmax(-1)) & counts_n
    return (loss_n * counts_n).sum(), torch.stack([agreeing_n.sum(), counts_n.sum()]).double()
