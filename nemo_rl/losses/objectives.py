"""The surrogate objectives of policy gradients, per token, as losses to minimise.

`policy_gradient` picks one at construction. They are element-wise functions of (log-probability, ratio, advantage);
the caller applies masks, weights and reductions.

Legend: `B` samples, `T` predicted positions.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

type ObjectiveFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs_BT, ratio_BT, advantages_BT) -> loss_BT."""


def clip_ratio(ratio_BT: Tensor, clip_min: float, clip_max: float) -> Tensor:
    """`clamp(ratio, 1 - clip_min, 1 + clip_max)`; clip_max > clip_min is DAPO's clip-higher."""
    return ratio_BT.clamp(1 - clip_min, 1 + clip_max)


def clipped_surrogate(
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """`-min(r A, clip(r) A)`: PPO, arXiv 1707.06347, equation 7."""
    clipped_BT = clip_ratio(ratio_BT, clip_min, clip_max)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


def dual_clipped_surrogate(
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_min: float,
    clip_max: float,
    clip_c: float,
) -> Tensor:
    """PPO's loss, limited to `-c A` where A < 0: dual clip, arXiv 1912.09729, equation 5."""
    loss_BT = clipped_surrogate(logprobs_BT, ratio_BT, advantages_BT, clip_min=clip_min, clip_max=clip_max)
    limited_BT = torch.minimum(loss_BT, -clip_c * advantages_BT)
    return torch.where(advantages_BT < 0, limited_BT, loss_BT)


def reinforce(logprobs_BT: Tensor, ratio_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """`-A log p`: REINFORCE, without a ratio."""
    return -advantages_BT * logprobs_BT


def cispo(
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """`-stop_gradient(clip(r)) A log p`: CISPO, arXiv 2506.13585, equation 4.

    Every token keeps its gradient; clipping only limits its weight.
    """
    weight_BT = clip_ratio(ratio_BT.detach(), clip_min, clip_max)
    return -weight_BT * advantages_BT * logprobs_BT


def make_objective(
    *, clip_min: float, clip_max: float, clip_c: float | None, use_ratio: bool, use_cispo: bool
) -> ObjectiveFn:
    """Choose the surrogate objective.

    Args:
        clip_min: Clip range below 1.
        clip_max: Clip range above 1.
        clip_c: Dual-clip constant, above 1; None for single clip.
        use_ratio: False gives REINFORCE.
        use_cispo: True gives CISPO.
    """
    if not use_ratio:
        return reinforce
    if use_cispo:
        return partial(cispo, clip_min=clip_min, clip_max=clip_max)
    if clip_c is not None:
        return partial(dual_clipped_surrogate, clip_min=clip_min, clip_max=clip_max, clip_c=clip_c)
    return partial(clipped_surrogate, clip_min=clip_min, clip_max=clip_max)
