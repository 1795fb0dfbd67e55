"""Policy ratios and importance weights on the sampled tokens.

`policy_gradient` picks one ratio and one weight function at construction. Invariant: a ratio function is
differentiable in the current log-probabilities and bounded; an importance weight is neither, and 0 where it overflows.

Legend: `B` samples, `T` predicted positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_rl.losses.reductions import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios of a differentiable ratio are limited to this size before `exp`, which keeps float32 finite."""

type RatioFn = Callable[[Tensor, Tensor], Tensor]
"""(log_ratio_BT, mask_BT) -> ratio_BT."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Correction for tokens sampled by another policy than the one trained.

    Attributes:
        weights_BT: Factor on each token's loss.
        is_out_of_bounds_BT: 1 where the raw weight lay outside the bounds.
    """

    weights_BT: Tensor
    is_out_of_bounds_BT: Tensor


type TruncationFn = Callable[[Tensor, Tensor, Tensor], ImportanceWeights]
"""(raw_weights_BT, log_ratio_BT, mask_BT) -> ImportanceWeights."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of a log-ratio limited to `[-MAX_LOG_RATIO, MAX_LOG_RATIO]`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`p(token) / q(token)` for each token (PPO)."""
    return bounded_exp(log_ratio_BT)


def sequence_mean_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Geometric mean of the token ratios of a sequence, on each of its tokens.

    `s = (p(y|x) / q(y|x))^(1/|y|)`, GSPO, arXiv 2507.18071, equation 7.
    """
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, dim=-1)[:, None]
    return bounded_exp(mean_B1).expand_as(log_ratio_BT)


def token_weight(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`p(token) / q(token)` for each token, without a limit; infinite beyond the range of the number format."""
    return log_ratio_BT.exp()


def sequence_product_weight(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`p(y|x) / q(y|x)` of the whole sequence, on each of its tokens: the unbiased weight, without a limit."""
    kept_BT = (mask_BT != 0).to(log_ratio_BT.dtype)
    total_B1 = masked_sum(log_ratio_BT, kept_BT, dim=-1)[:, None]
    return total_B1.exp().expand_as(log_ratio_BT)


def without_overflow(weights: Tensor) -> Tensor:
    """Replace infinite weights by 0: a token with such a weight carries no usable signal."""
    return torch.where(weights.isinf(), 0.0, weights)


def untruncated(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor) -> ImportanceWeights:
    """Keep the raw weights, with 0 where they overflow."""
    return ImportanceWeights(without_overflow(raw_BT), torch.zeros_like(raw_BT))


def truncate(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> ImportanceWeights:
    """`min(max(w, low), high)`: truncated importance sampling (TIS), usually with `low` 0."""
    return ImportanceWeights(raw_BT.clamp(low, high), _is_outside(raw_BT, low, high))


def drop_tokens(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> ImportanceWeights:
    """`w` inside `[low, high]` and 0 outside: IcePop, arXiv 2510.18855."""
    outside_BT = _is_outside(raw_BT, low, high)
    return ImportanceWeights(_kept(raw_BT, outside_BT), outside_BT)


def drop_sequences(
    raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float
) -> ImportanceWeights:
    """Keep the raw weights, with 0 on sequences whose geometric mean token ratio lies outside of `[low, high]`."""
    outside_BT = _is_outside(sequence_mean_ratio(log_ratio_BT, mask_BT), low, high)
    return ImportanceWeights(_kept(raw_BT, outside_BT), outside_BT)


def _kept(raw_BT: Tensor, outside_BT: Tensor) -> Tensor:
    return torch.where(outside_BT != 0, 0.0, without_overflow(raw_BT))


def _is_outside(values: Tensor, low: float, high: float) -> Tensor:
    return ((values < low) | (values > high)).to(values.dtype)


TRUNCATIONS: dict[str, Callable[..., ImportanceWeights]] = {
    "tis": truncate,
    "icepop": drop_tokens,
    "seq-mask-tis": drop_sequences,
}


def make_truncation(kind: str | None, low: float | None, high: float | None) -> TruncationFn:
    """Choose the truncation of importance weights.

    Args:
        kind: A key of `TRUNCATIONS`; None for none.
        low: Lower bound, 0 when None.
        high: Upper bound, infinite when None.
    """
    if kind is None:
        return untruncated
    return partial(TRUNCATIONS[kind], low=0.0 if low is None else low, high=math.inf if high is None else high)
