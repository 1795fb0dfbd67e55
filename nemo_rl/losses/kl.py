"""Per-token estimators of the KL divergence between two policies.

All functions are element-wise; the caller applies masks and reductions.

The gradient of a divergence `E_p[k]` has two parts, because the policy also decides which tokens are sampled:

    d E_p[k] = E_p[d k + k d log p]

Differentiating an estimate `k` gives the first part only. Weighting it by `exp(log p - stop(log p))`, which is 1 and
has the gradient of `log p`, adds the second, the score-function part.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.utils.errors import ConfigError


def k1(log_ratio: Tensor) -> Tensor:
    """`-log r`: unbiased, high variance, may be negative; exact gradient with the weight, 0 without."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased, low variance.

    Without the weight its gradient is that of the true KL. With the weight it is that of `E_p[(log r)^2] / 2`, a
    different quantity (about twice as large; one to three times on random categoricals of nine tokens).
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """`r - 1 - log r`: unbiased, low variance, never negative; exact gradient with the weight, biased without."""
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
        input_clamp_value: `log r` is limited to `[-value, value]`; None leaves it.
        output_clamp_value: The weighted estimate is limited to `[-value, value]`; None leaves it.
        importance_sampling_weights: Multiplied onto the estimate before the output clamp, same shape;
            differentiable. `p_policy / stop(p_policy)` keeps the values and adds the score-function part of the
            gradient (see the module docstring); `p_policy / p_behaviour` estimates the policy's KL from another
            policy's samples, with the same gradient in expectation.

    Returns:
        KL estimate per token, same shape. Entries that a clamp limits have no gradient: where the log-ratio is limited
        the weight keeps its value and loses its gradient.

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
    """Return what the KL penalty takes from the reward of each token, `[B, T]` float64; 0 where the mask is 0.

    Args:
        logprobs_BT: log-probabilities under the policy.
        logprobs_reference_BT: those under the reference policy.
        mask_BT: not 0 on tokens that count; other log-probabilities may be anything.
        config: weight, estimator and clamps.
    """
    kl_BT = calculate_kl(
        torch.where(mask_BT != 0, logprobs_BT.double(), 0.0),
        torch.where(mask_BT != 0, logprobs_reference_BT.double(), 0.0),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
    )
    return config.reference_policy_kl_penalty * kl_BT
