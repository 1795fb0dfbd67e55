"""Per-token estimators of the KL divergence between two policies.

Used by the policy-gradient loss, by REINFORCE++ (KL in the reward) and by the train/generation
mismatch metrics. Law: element-wise only; masks and reductions are the caller's.
"""

from collections.abc import Callable

from torch import Tensor

from nemo_rl.utils.errors import ConfigError


def k1(log_ratio: Tensor) -> Tensor:
    """`-log r`: unbiased, high variance, may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased, low variance; its gradient is that of the true KL on-policy."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """`r - 1 - log r`: unbiased, low variance, never negative."""
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
        output_clamp_value: The estimate is limited to `[-value, value]`; None leaves it.
        importance_sampling_weights: Multiplied onto the clamped estimate, same shape. With
            `p_policy / p_behaviour` this estimates the policy's KL from another policy's samples.

    Returns:
        KL estimate per token, same shape. Clamped entries have no gradient.

    Raises:
        ConfigError: `kl_type` is unknown.
    """
    if kl_type not in KL_ESTIMATORS:
        raise ConfigError(
            f"loss_fn.reference_policy_kl_type={kl_type!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}."
        )
    log_ratio = logprobs_reference - logprobs
    if input_clamp_value is not None:
        log_ratio = log_ratio.clamp(-input_clamp_value, input_clamp_value)
    kl = KL_ESTIMATORS[kl_type](log_ratio)
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl if importance_sampling_weights is None else kl * importance_sampling_weights
