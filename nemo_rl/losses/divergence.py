"""Measure the distance between two policies on sampled tokens.

The estimators of the KL divergence of two policies are element-wise functions. The caller applies masks and reductions.

The gradient of a divergence `E_p[k]` has two parts, because the policy also decides which tokens are sampled:

    d E_p[k] = E_p[d k + k d log p]

The gradient of an estimate `k` is only the first part. The weight `exp(log p - stop(log p))` has the value 1 and the
gradient of `log p`. It adds the second part, which is the score-function part.

Other functions compute metrics of the mismatch between the trained policy and the generation engine. Invariants: these
metrics are not differentiable. Sums are divided by counts of the global batch, so metrics of its parts add up. Metrics
are not clamped, so a value beyond the range of the number format is infinite.

Legend: `B` samples, `T` predicted positions.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.loss_function import LossMetrics
from nemo_rl.losses.objectives import PolicyBatch, token_weight, without_overflow
from nemo_rl.losses.reductions import masked_max, masked_mean, masked_min, masked_sum, safe_divide
from nemo_rl.utils.errors import ConfigError


def k1(log_ratio: Tensor) -> Tensor:
    """Return `-log r`: unbiased, with high variance, possibly negative. Its gradient is exact only with the weight."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return `(log r)^2 / 2`: biased, with low variance.

    Without the weight, its gradient is that of the true KL. With the weight, it is that of `E_p[(log r)^2] / 2`, which
    is about twice as large (one to three times on random categoricals of nine tokens).
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return `r - 1 - log r`: unbiased, with low variance, never negative. Its gradient is exact with the weight."""
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Estimate `KL(policy || reference)` per token from tokens sampled by the policy.

    With `r = p_reference / p_policy` of the sampled token (Schulman, "Approximating KL Divergence",
    2020): k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.

    Args:
        logprobs: Log-probabilities under the policy, any shape.
        logprobs_reference: Log-probabilities of the same tokens under the reference, same shape.
        kl_type: One of `k1`, `k2`, `k3`.
        input_clamp_value: Limit of `log r` to `[-value, value]`. If None, there is no limit.
        output_clamp_value: Limit of the weighted estimate to `[-value, value]`. If None, there is no limit.
        importance_sampling_weights: Differentiable factors of the estimate before the output clamp, same shape.
            `p_policy / stop(p_policy)` keeps the values and adds the score-function part of the gradient (see the
            module docstring); `p_policy / p_behaviour` estimates the policy's KL from another policy's samples, with
            the same gradient in expectation.

    Returns:
        KL estimate per token, same shape. Entries that a clamp limits have no gradient. If the log-ratio is limited,
        the weight is detached: it keeps its value and has no gradient.

    Raises:
        ConfigError: `kl_type` is unknown.
    """
    if kl_type not in KL_ESTIMATORS:
        raise ConfigError(
            f"loss_fn.reference_policy_kl_type={kl_type!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}."
        )
    log_ratio, weights = logprobs_reference - logprobs, importance_sampling_weights
    if input_clamp_value is not None:
        if weights is not None:
            weights = torch.where(log_ratio.detach().abs() > input_clamp_value, weights.detach(), weights)
        log_ratio = log_ratio.clamp(-input_clamp_value, input_clamp_value)
    kl = KL_ESTIMATORS[kl_type](log_ratio)
    if weights is not None:
        kl = kl * weights
    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)


def kl_penalty(
    logprobs_BT: Tensor, logprobs_reference_BT: Tensor, mask_BT: Tensor, config: ClippedPGLossConfig
) -> Tensor:
    """Return the KL penalty on the reward of each token, `[B, T]` float64, or 0 where the mask is 0.

    Args:
        logprobs_BT: Log-probabilities under the policy.
        logprobs_reference_BT: Log-probabilities under the reference policy.
        mask_BT: Non-zero on tokens that count. Log-probabilities of all other tokens are ignored.
        config: Section with weight, estimator and clamps.
    """
    kl_BT = calculate_kl(
        torch.where(mask_BT != 0, logprobs_BT.double(), 0.0),
        torch.where(mask_BT != 0, logprobs_reference_BT.double(), 0.0),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
    )
    return config.reference_policy_kl_penalty * kl_BT


_OF_SEQUENCES = tuple(f"{kind}_seq_mult_prob_error" for kind in ("max", "min", "mean"))
MISMATCH_METRICS = frozenset(
    (
        *("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"),
        *("sampling_importance_ratio", "is_oob_ratio"),
        *_OF_SEQUENCES,
        *(f"{name}_after_mask" for name in _OF_SEQUENCES),
    )
)
"""Metrics that compare only the policy before an update with the engine."""


@torch.no_grad()
def mismatch_metrics(batch: PolicyBatch, global_valid_toks: Tensor | float, kl_type: str) -> dict[str, Tensor]:
    """Compute metrics of the mismatch between p, the policy at the start of the update, and g, the engine.

    Args:
        batch: One microbatch.
        global_valid_toks: Number of tokens that count in the global batch.
        kl_type: Estimator of `gen_kl_error` and `policy_kl_error`, as in the loss's KL term.

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
    """Return each sample's mean of `exp(|log p - log g|)` over counted tokens, `[B]`, or 0 without such tokens."""
    difference_BT = torch.where(mask_BT != 0, policy_BT - engine_BT, 0.0)
    return masked_mean(difference_BT.abs().exp(), (mask_BT != 0).to(difference_BT.dtype), dim=-1)


def sequence_error_metrics(errors_B: Tensor, counts_B: Tensor, num_samples: Tensor | float) -> LossMetrics:
    """Return the largest, smallest and mean error of the samples with a token that counts.

    Args:
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
    """Rename metrics to their names for the time after samples beyond the error threshold are masked."""
    return {f"{name}_after_mask": value for name, value in metrics.items()}
