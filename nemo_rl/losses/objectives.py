"""Compute the parts of the policy gradient: tensors of a microbatch, ratios, importance weights and objectives.

`policy_gradient` chooses one ratio, one weight and one objective at construction. Objectives are element-wise losses to
minimise. The caller applies masks, weights and reductions to them. `make_policy_batch` aligns, masks and cleans the
tensors of a microbatch.

Invariants: a ratio is bounded, and differentiable in the current log-probabilities. An importance weight is unbounded
and not differentiable, and 0 if it overflows. After `make_policy_batch` every log-probability is finite, or NaN because
of a real error. Entries that do not count are exactly 0, so no later formula has to handle padding.

Legend: `B` samples, `T` the predicted positions, one fewer than the tokens of a sequence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_rl.losses.loss_function import LossData
from nemo_rl.losses.reductions import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0
"""Limit of the absolute log-ratio in a differentiable ratio, which keeps its `exp` finite in float32."""

type RatioFn = Callable[[Tensor, Tensor], Tensor]
"""Function of `log_ratio_BT` and `mask_BT` that returns `ratio_BT`."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Correction for tokens that another policy than the trained one sampled."""

    weights_BT: Tensor
    """Factor of each token's loss."""
    is_out_of_bounds_BT: Tensor
    """1 where the raw weight was outside the bounds."""


type TruncationFn = Callable[[Tensor, Tensor, Tensor], ImportanceWeights]
"""Function of `raw_weights_BT`, `log_ratio_BT` and `mask_BT` that returns `ImportanceWeights`."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp` of a log-ratio that is limited to `[-MAX_LOG_RATIO, MAX_LOG_RATIO]`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return `p(token) / q(token)` for each token (PPO)."""
    return bounded_exp(log_ratio_BT)


def sequence_mean_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the geometric mean of a sequence's token ratios, for each of its tokens.

    `s = (p(y|x) / q(y|x))^(1/|y|)`, GSPO, arXiv 2507.18071, equation 7.
    """
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, dim=-1)[:, None]
    return bounded_exp(mean_B1).expand_as(log_ratio_BT)


def token_weight(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return `p(token) / q(token)` for each token, without a limit. A value beyond the number format is infinite."""
    return log_ratio_BT.exp()


def sequence_product_weight(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the unbiased weight `p(y|x) / q(y|x)` of the whole sequence for each of its tokens, without a limit."""
    kept_BT = (mask_BT != 0).to(log_ratio_BT.dtype)
    total_B1 = masked_sum(log_ratio_BT, kept_BT, dim=-1)[:, None]
    return total_B1.exp().expand_as(log_ratio_BT)


def without_overflow(weights: Tensor) -> Tensor:
    """Replace infinite weights by 0, because a token with such a weight carries no usable signal."""
    return torch.where(weights.isinf(), 0.0, weights)


def untruncated(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor) -> ImportanceWeights:
    """Keep the raw weights. Set weights that overflow to 0."""
    return ImportanceWeights(without_overflow(raw_BT), torch.zeros_like(raw_BT))


def truncate(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> ImportanceWeights:
    """Return `min(max(w, low), high)`: truncated importance sampling (TIS), usually with `low` 0."""
    return ImportanceWeights(raw_BT.clamp(low, high), _is_outside(raw_BT, low, high))


def drop_tokens(raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> ImportanceWeights:
    """Return `w` inside `[low, high]` and 0 outside: IcePop, arXiv 2510.18855."""
    outside_BT = _is_outside(raw_BT, low, high)
    return ImportanceWeights(_kept(raw_BT, outside_BT), outside_BT)


def drop_sequences(
    raw_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, *, low: float, high: float
) -> ImportanceWeights:
    """Keep the raw weights, but set them to 0 in sequences whose geometric mean ratio is outside `[low, high]`."""
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
        kind: A key of `TRUNCATIONS`. If None, weights are not truncated.
        low: Lower bound. If None, 0.
        high: Upper bound. If None, infinity.
    """
    if kind is None:
        return untruncated
    return partial(TRUNCATIONS[kind], low=0.0 if low is None else low, high=math.inf if high is None else high)


type ObjectiveFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of `logprobs_BT`, `ratio_BT` and `advantages_BT` that returns `loss_BT`."""


def clip_ratio(ratio_BT: Tensor, clip_min: float, clip_max: float) -> Tensor:
    """Return `clamp(ratio, 1 - clip_min, 1 + clip_max)`, which is DAPO's clip-higher if clip_max > clip_min."""
    return ratio_BT.clamp(1 - clip_min, 1 + clip_max)


def clipped_surrogate(
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """Return `-min(r A, clip(r) A)`: PPO, arXiv 1707.06347, equation 7."""
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
    """Return PPO's loss, limited to `-c A` where A < 0: dual clip, arXiv 1912.09729, equation 5."""
    loss_BT = clipped_surrogate(logprobs_BT, ratio_BT, advantages_BT, clip_min=clip_min, clip_max=clip_max)
    limited_BT = torch.minimum(loss_BT, -clip_c * advantages_BT)
    return torch.where(advantages_BT < 0, limited_BT, loss_BT)


def reinforce(logprobs_BT: Tensor, ratio_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """Return `-A log p`: REINFORCE, without a ratio."""
    return -advantages_BT * logprobs_BT


def cispo(
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """Return `-stop_gradient(clip(r)) A log p`: CISPO, arXiv 2506.13585, equation 4.

    Every token has a gradient. Clipping only limits its weight.
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
        clip_c: Dual-clip constant, above 1. If None, there is no dual clip.
        use_ratio: If False, use REINFORCE.
        use_cispo: If True, use CISPO.
    """
    if not use_ratio:
        return reinforce
    if use_cispo:
        return partial(cispo, clip_min=clip_min, clip_max=clip_max)
    if clip_c is not None:
        return partial(dual_clipped_surrogate, clip_min=clip_min, clip_max=clip_max, clip_c=clip_c)
    return partial(clipped_surrogate, clip_min=clip_min, clip_max=clip_max)


@dataclass(frozen=True)
class PolicyBatch:
    """Tensors of one microbatch, aligned to the predicted tokens."""

    logprobs_BT: Tensor
    """Log-probabilities of the current policy, differentiable."""
    prev_logprobs_BT: Tensor
    """Log-probabilities of the policy at the start of the update. If on-policy, the detached current ones."""
    generation_logprobs_BT: Tensor
    """Log-probabilities of the engine that sampled the tokens."""
    reference_logprobs_BT: Tensor | None
    """Log-probabilities of the reference policy, or None if the loss does not use it."""
    advantages_BT: Tensor
    """Advantage per token."""
    mask_BT: Tensor
    """`token_mask * sample_mask`, with 0 on filtered tokens."""
    num_tokens_B: Tensor
    """`sum(token_mask)` per sample, including filtered tokens."""
    sample_mask_B: Tensor
    """Weight of each sample."""
    num_filtered_tokens: Tensor
    """Scalar number of filtered tokens, which have a log-probability of -inf."""
    positive_BT: Tensor
    """1 on tokens of answers with a positive reward. Without rewards, 1 where the advantage is positive."""


def make_policy_batch(
    next_token_logprobs_BT: Tensor, data: LossData, *, on_policy: bool, use_reference: bool
) -> PolicyBatch:
    """Shift the batch by one token, and mask tokens that top-k/top-p filtering made impossible.

    If a policy gives a token the probability 0 (log-probability -inf), its ratio cannot be used. Such a token is
    removed from the mask and counted. It stays in the denominators, which must not depend on the parameters. NaN is
    never hidden.

    Args:
        next_token_logprobs_BT: `[B, T-1]`, log-probabilities of tokens 1..T-1.
        data: Holds `advantages`, `generation_logprobs` and `token_mask` `[B, T]`, `sample_mask [B]` and, if used,
            `prev_logprobs` and `reference_policy_logprobs` `[B, T]`. It may hold `positive_examples [B]`, 1 for answers
            with a positive reward.
        on_policy: Use the current log-probabilities, detached, as `prev_logprobs`. This is also done if `data` has no
            `prev_logprobs`.
        use_reference: Whether the reference log-probabilities are needed.
    """
    current_BT = next_token_logprobs_BT
    is_on_policy = on_policy or "prev_logprobs" not in data
    prev_BT = current_BT.detach() if is_on_policy else _shift(data["prev_logprobs"])
    generation_BT = _shift(data["generation_logprobs"])
    reference_BT = _shift(data["reference_policy_logprobs"]) if use_reference else None

    sample_mask_B = data["sample_mask"].to(current_BT.dtype)
    token_mask_BT = _shift(data["token_mask"]).to(current_BT.dtype)
    full_mask_BT = token_mask_BT * sample_mask_B[:, None]
    impossible_BT = _is_impossible(current_BT.detach(), prev_BT, generation_BT, reference_BT)
    mask_BT = full_mask_BT.masked_fill(impossible_BT, 0.0)

    def clean(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT != 0, values_BT, 0.0)

    advantages_BT = clean(_shift(data["advantages"]))
    positive_B = data.get("positive_examples")
    return PolicyBatch(
        logprobs_BT=clean(current_BT),
        prev_logprobs_BT=clean(prev_BT),
        generation_logprobs_BT=clean(generation_BT),
        reference_logprobs_BT=None if reference_BT is None else clean(reference_BT),
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        num_tokens_B=token_mask_BT.sum(-1),
        sample_mask_B=sample_mask_B,
        num_filtered_tokens=((full_mask_BT != 0) & impossible_BT).sum(),
        positive_BT=(advantages_BT > 0 if positive_B is None else (positive_B != 0)[:, None]).to(current_BT.dtype),
    )


def _shift(values_BT: Tensor) -> Tensor:
    return values_BT[:, 1:]


def _is_impossible(*logprobs: Tensor | None) -> Tensor:
    present = [values_BT == -torch.inf for values_BT in logprobs if values_BT is not None]
    return torch.stack(present).any(0)
