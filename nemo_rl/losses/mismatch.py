"""Measure how much the trained policy and the generation engine disagree on the sampled tokens.

`policy_gradient` always reports these. Invariant: nothing here is differentiable; sums are divided by counts of the
global batch, so parts of a batch add up; and no value is clamped: beyond the range of the number format it is infinite.

Legend: `B` samples, `T` predicted positions.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl.losses.kl import calculate_kl
from nemo_rl.losses.loss_function import LossMetrics
from nemo_rl.losses.objectives import token_weight, without_overflow
from nemo_rl.losses.policy_batch import PolicyBatch
from nemo_rl.losses.reductions import masked_max, masked_mean, masked_min, masked_sum, safe_divide

_OF_SEQUENCES = tuple(f"{kind}_seq_mult_prob_error" for kind in ("max", "min", "mean"))
MISMATCH_METRICS = frozenset(
    (
        *("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"),
        *("sampling_importance_ratio", "is_oob_ratio"),
        *_OF_SEQUENCES,
        *(f"{name}_after_mask" for name in _OF_SEQUENCES),
    )
)
"""Metrics that compare the policy before an update with the engine, and no other pair of policies."""


@torch.no_grad()
def mismatch_metrics(batch: PolicyBatch, global_valid_toks: Tensor | float, kl_type: str) -> dict[str, Tensor]:
    """Compute metrics of train/generation mismatch; p is the policy at the start of the update, g the engine.

    Args:
        batch: One microbatch.
        global_valid_toks: Tokens that count in the global batch.
        kl_type: Estimator of `gen_kl_error` and `policy_kl_error`, the one of the loss's KL term.

    Returns:
        token_mult_prob_error: mean of `exp(|log p - log g|)`; 1 when both agree exactly.
        gen_kl_error: estimate of `KL(g || p)`.
        policy_kl_error: estimate of `KL(p || g)`, without importance weights.
        js_divergence_error: mean of `k3(m, p)` and `k3(m, g)` with the mixture m = (p + g) / 2.
        approx_entropy: `-mean(p_now / g * log p_now)`, the current policy's entropy estimated by
            importance sampling, in nats per token.
    """
    policy_BT, engine_BT = batch.prev_logprobs_BT, batch.generation_logprobs_BT
    current_BT = batch.logprobs_BT.detach()
    mixture_BT = torch.logaddexp(policy_BT, engine_BT) - math.log(2)
    js_BT = 0.5 * (_unbounded_kl(mixture_BT, policy_BT, "k3") + _unbounded_kl(mixture_BT, engine_BT, "k3"))
    weights_BT = without_overflow(token_weight(current_BT - engine_BT, batch.mask_BT))
    per_token = {
        "token_mult_prob_error": (policy_BT - engine_BT).abs().exp(),
        "gen_kl_error": _unbounded_kl(engine_BT, policy_BT, kl_type),
        "policy_kl_error": _unbounded_kl(policy_BT, engine_BT, kl_type),
        "js_divergence_error": js_BT,
        "approx_entropy": -weights_BT * current_BT,
    }
    return {
        name: masked_mean(values_BT, batch.mask_BT, global_normalization_factor=global_valid_toks)
        for name, values_BT in per_token.items()
    }


def _unbounded_kl(logprobs_BT: Tensor, logprobs_reference_BT: Tensor, kl_type: str) -> Tensor:
    return calculate_kl(logprobs_BT, logprobs_reference_BT, kl_type, input_clamp_value=None, output_clamp_value=None)


def sequence_errors(policy_BT: Tensor, engine_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean of `exp(|log p - log g|)` over the tokens of each sample that count, `[B]`; 0 without any."""
    difference_BT = torch.where(mask_BT != 0, policy_BT - engine_BT, 0.0)
    return masked_mean(difference_BT.abs().exp(), (mask_BT != 0).to(difference_BT.dtype), dim=-1)


def sequence_error_metrics(errors_B: Tensor, counts_B: Tensor, num_samples: Tensor | float) -> LossMetrics:
    """Return the largest, smallest and mean error of the samples that have a token that counts.

    Args:
        errors_B: `sequence_errors`.
        counts_B: Non-zero for samples with a token that counts.
        num_samples: Number of such samples in the global batch.
    """
    counts_B = (counts_B != 0).to(errors_B.dtype)
    return {
        "max_seq_mult_prob_error": masked_max(errors_B, counts_B),
        "min_seq_mult_prob_error": masked_min(errors_B, counts_B),
        "mean_seq_mult_prob_error": safe_divide(masked_sum(errors_B, counts_B), num_samples),
    }


def after_mask[ValueT](metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Rename metrics to the names that they have once samples beyond the threshold are masked."""
    return {f"{name}_after_mask": value for name, value in metrics.items()}
