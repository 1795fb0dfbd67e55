"""Align, mask and clean the tensors of one policy-gradient microbatch.

Invariant: after `make_policy_batch` every log-probability is finite, or NaN because of a real error, and entries that
do not count are exactly 0, so no later formula has to handle padding.

Legend: `B` samples, `T` here the T-1 predicted positions of sequences of T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.losses.loss_function import LossData


@dataclass(frozen=True)
class PolicyBatch:
    """Tensors of one microbatch, all aligned to the predicted tokens."""

    logprobs_BT: Tensor
    """Current policy, differentiable."""
    prev_logprobs_BT: Tensor
    """Policy at the start of the update; the current one detached if on-policy."""
    generation_logprobs_BT: Tensor
    """Engine that sampled the tokens."""
    reference_logprobs_BT: Tensor | None
    """Reference policy, or None if the loss does not use it."""
    advantages_BT: Tensor
    """Advantage per token."""
    mask_BT: Tensor
    """`token_mask * sample_mask`, and 0 on filtered tokens."""
    num_tokens_B: Tensor
    """`sum(token_mask)` per sample, filtered tokens included."""
    sample_mask_B: Tensor
    """Weight of each sample."""
    num_filtered_tokens: Tensor
    """Scalar, tokens dropped because some log-probability was -inf."""
    positive_BT: Tensor
    """1 on tokens of answers with a positive reward; without rewards, where the advantage is positive."""


def make_policy_batch(
    next_token_logprobs_BT: Tensor, data: LossData, *, on_policy: bool, use_reference: bool
) -> PolicyBatch:
    """Shift the batch by one token and mask tokens that top-k/top-p filtering made impossible.

    A token that one of the policies gives probability 0 (log-probability -inf) carries no usable
    ratio: it is dropped from the mask and counted. It stays in the denominators, which must not
    depend on the parameters. NaN is never hidden.

    Args:
        next_token_logprobs_BT: `[B, T-1]`, log-probabilities of tokens 1..T-1.
        data: Holds `advantages`, `generation_logprobs`, `token_mask` `[B, T]`, `sample_mask [B]`,
            and, where used, `prev_logprobs` and `reference_policy_logprobs` `[B, T]`; may hold
            `positive_examples [B]`, 1 for answers with a positive reward.
        on_policy: Take the current log-probabilities, detached, as `prev_logprobs`. Also done when
            `data` has no `prev_logprobs`.
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
