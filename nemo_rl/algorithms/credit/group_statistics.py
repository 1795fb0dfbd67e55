"""Compute baselines, standard deviations and whitening over groups of samples.

Invariant: all statistics are computed in float64, and the standard deviation of rewards that differ only by the
rounding of float32 is exactly 0, because a division by a tiny deviation would enlarge the rounding errors.

Legend: `B` samples, `T` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_rl.losses.reductions import masked_mean, masked_var

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

VARIANCE_FLOOR = 1e-8
"""Smallest variance in REINFORCE++, which divides by its square root; PPO adds it to the variance of its tokens."""

RELATIVE_SPREAD_FLOOR = 1e-14
"""Share of a group's sum of squares that is treated as rounding noise of float64."""

EQUAL_SPREAD = 1e-6
"""Rewards whose deviation is at most this share of their group's largest magnitude are taken as equal.

Rewards come from environments in float32, where a sum such as 0.1 + 0.6 differs from 0.7 by 4e-8.
"""


@dataclass(frozen=True)
class GroupStatistics:
    """Float64 baseline and standard deviation `[B]` for each sample."""

    baseline_B: Tensor
    std_B: Tensor


def group_ids_from_prompts(prompts: Tensor) -> Tensor:
    """Number the distinct rows of `prompts [B, T_prompt]`, so that equal prompts get equal ids `[B]`."""
    return torch.unique(prompts, dim=0, return_inverse=True)[1]


def group_statistics(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    valid_mask_B: Tensor,
    leave_one_out: bool,
    magnitudes_B: Tensor | None = None,
) -> GroupStatistics:
    """Return, for each sample, the mean and sample standard deviation of the rewards that it is compared with.

    A sample is compared with the rewards of the valid samples of its group, without its own if `leave_one_out`. With
    deviations d from the mean of n samples and S = sum(d^2), leaving sample i out gives mean_i = mean - d_i / (n - 1)
    and var_i = (S - d_i^2 n / (n - 1)) / (n - 2).

    If a group has at most one valid member, the baseline of its samples is their own reward. The deviation is 0 if
    there is only one reward to compare with, or if it is at most `EQUAL_SPREAD` of the largest magnitude of the group.

    Args:
        rewards_B: `[B]` float.
        group_ids_B: `[B]` int64, any values.
        valid_mask_B: `[B]`, non-zero for samples that count.
        leave_one_out: Leave the sample itself out of the rewards that it is compared with.
        magnitudes_B: `[B]`, sum of the absolute summands of each reward. If None, the absolute value of the reward.
    """
    rewards_B = rewards_B.double()
    valid_B = (valid_mask_B != 0).double()
    _, index_B = torch.unique(group_ids_B, return_inverse=True)

    def group_sum(values_B: Tensor) -> Tensor:
        totals = values_B.new_zeros(values_B.shape[0]).index_add_(0, index_B, values_B)
        return totals[index_B]

    count_B = group_sum(valid_B)
    clean_B = torch.where(valid_B != 0, rewards_B, 0.0)
    mean_B = group_sum(clean_B) / count_B.clamp(min=1)
    deviation_B = torch.where(valid_B != 0, clean_B - mean_B, 0.0)
    squares_B = group_sum(deviation_B**2)
    noise_B = RELATIVE_SPREAD_FLOOR * squares_B
    sizes_B = torch.where(valid_B != 0, (rewards_B if magnitudes_B is None else magnitudes_B).double().abs(), 0.0)
    largest_B = sizes_B.new_zeros(len(sizes_B)).scatter_reduce_(0, index_B, sizes_B, "amax")[index_B]

    size_B = count_B - valid_B if leave_one_out else count_B
    if leave_one_out:
        divisor_B = size_B.clamp(min=1)
        mean_B = mean_B - deviation_B / divisor_B
        squares_B = squares_B - deviation_B**2 * (size_B + 1) / divisor_B
    variance_B = torch.where(squares_B > noise_B, squares_B, 0.0) / (size_B - 1).clamp(min=1)
    variance_B = torch.where(variance_B > (EQUAL_SPREAD * largest_B) ** 2, variance_B, 0.0)
    return GroupStatistics(
        baseline_B=torch.where(count_B > 1, mean_B, rewards_B),
        std_B=torch.where(size_B > 1, variance_B, 0.0).sqrt(),
    )


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return baseline and standard deviation `[B]` of each row's group of equal prompts.

    Args:
        prompts: `[B, T_prompt]` int64, padded.
        rewards: `[B]` float.
        valid_mask: `[B]`, 0 for rows that are left out of all statistics.
        leave_one_out_baseline: Leave the row itself out of mean and sample deviation.
        std_rewards: Rewards `[B]` for the deviation. If None, `rewards`.

    Returns:
        Baseline and standard deviation, in the dtype of `rewards`. `group_statistics` defines them.
    """
    group_ids = group_ids_from_prompts(prompts)
    statistics = group_statistics(rewards, group_ids, valid_mask, leave_one_out_baseline)
    std_B = statistics.std_B
    if std_rewards is not None:
        std_B = group_statistics(std_rewards, group_ids, valid_mask, leave_one_out_baseline).std_B
    return statistics.baseline_B.to(rewards.dtype), std_B.to(rewards.dtype)


def group_advantage(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    valid_mask_B: Tensor,
    *,
    leave_one_out: bool,
    normalize: bool,
    std_over_batch: bool = False,
    magnitudes_B: Tensor | None = None,
) -> Tensor:
    """Return `r - baseline` as `[B]` float64, divided by `std + 1e-6` where std > 0 if `normalize`.

    With `std_over_batch` the deviation is over all valid rewards, otherwise over the rewards of the baseline. See
    `group_statistics` for `magnitudes_B`.
    """
    statistics = group_statistics(rewards_B, group_ids_B, valid_mask_B, leave_one_out, magnitudes_B)
    advantage_B = rewards_B.double() - statistics.baseline_B
    if normalize:
        std_B = statistics.std_B
        if std_over_batch:
            one_group_B = torch.zeros_like(group_ids_B)
            std_B = group_statistics(rewards_B, one_group_B, valid_mask_B, False, magnitudes_B).std_B
        advantage_B = torch.where(std_B > 0, advantage_B / (std_B + STD_EPSILON), advantage_B)
    return torch.where(valid_mask_B != 0, advantage_B, 0.0)


type Divisor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that returns the divisor of whitening from the values, their 0/1 mask and their mean."""


def sample_std_plus_epsilon(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Return the sample deviation (n - 1) plus `STD_EPSILON`."""
    return masked_var(values, mask, mean=mean, unbiased=True).sqrt() + STD_EPSILON


def std_with_floor(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Return the population deviation (n), at least the square root of `VARIANCE_FLOOR`."""
    return masked_var(values, mask, mean=mean, unbiased=False).clamp(min=VARIANCE_FLOOR).sqrt()


def sample_std_with_floor(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Return the square root of the sample variance (n - 1) plus `VARIANCE_FLOOR`."""
    return (masked_var(values, mask, mean=mean, unbiased=True) + VARIANCE_FLOOR).sqrt()


def whiten(values: Tensor, mask: Tensor, divisor: Divisor) -> Tensor:
    """Shift the kept entries to mean 0, divide them by their deviation, and set all other entries to 0.

    If all kept entries are equal, they become 0.

    Args:
        values: Any shape.
        mask: Same shape, non-zero for entries that are kept.
        divisor: `sample_std_plus_epsilon`, `std_with_floor` or `sample_std_with_floor`.
    """
    kept = (mask != 0).to(values.dtype)
    mean = masked_mean(values, kept)
    std = masked_var(values, kept, mean=mean, unbiased=False).sqrt()
    is_noise = std <= RELATIVE_SPREAD_FLOOR * (1 + mean.abs())
    scaled = (values - mean) / divisor(values, kept, mean)
    return torch.where(is_noise | (mask == 0), 0.0, scaled)


def spread(name: str, values_BT: Tensor, mask_BT: Tensor, counts_B: Tensor | None = None) -> dict[str, float]:
    """Return mean, largest and smallest value of the tokens that count.

    Args:
        name: Name of the metrics.
        values_BT: Values of tokens, or `[B, 1]` with one value for all tokens of a row.
        mask_BT: Non-zero where a token counts.
        counts_B: Number of tokens of each row, as weights for the mean of values `[B, 1]`.
    """
    counted_BT = mask_BT.numpy() > 0
    values = torch.from_numpy(values_BT.numpy()[counted_BT])  # numpy selects twenty times faster than torch
    if values.numel() == 0:
        return {f"{name}/mean": 0.0, f"{name}/max": 0.0, f"{name}/min": 0.0}
    counts = None if counts_B is None else counts_B.numpy()[counted_BT[:, 0]]
    mean = float(values.mean()) if counts is None else float(np.average(values.double().numpy(), weights=counts))
    return {f"{name}/mean": mean, f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}
