"""Scale rewards and apply length penalties, by pure functions of rewards, lengths and truncation.

Rewards are scaled first, then penalised, and advantages are computed from the result. Invariant: nothing is changed in
place, so the original rewards stay available to metrics.

Legend: `B` samples.
"""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import (
    EffortLevelConfig,
    RewardedTrainingConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    check_reward_scaling,
    check_reward_shaping,
    report_findings,
)
from nemo_rl.experience.trajectory import Outcome, Trajectory


def linear_map(rewards_B: Tensor, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Map the range `source` linearly onto `target`, after clamping rewards to `source`.

    Example:
        >>> linear_map(torch.tensor([0.0, 1.0]), (0.0, 1.0), (-1.0, 1.0))
        tensor([-1.,  1.])
    """
    (source_min, source_max), (target_min, target_max) = source, target
    share_B = (rewards_B.clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return target_min + share_B * (target_max - target_min)


def overlong_penalty(
    response_lengths_B: Tensor,
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_buffer_penalty: float,
    limited: bool = False,
) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), at most 0.

    The penalty is 0 up to `max - buffer` tokens and falls linearly to `-penalty` at `max`. For longer answers it keeps
    falling at the same rate, or stays at `-penalty` if `limited`, as in the paper. Without a buffer, answers longer
    than `max` get `-penalty`.

    Args:
        response_lengths_B: Generated tokens per sample.
        max_response_length: Number of tokens at which the penalty is full.
        overlong_buffer_length: Number of tokens over which the penalty grows. If it is more than `max_response_length`,
            even the shortest answer gets a part of the penalty.
        overlong_buffer_penalty: Size of the full penalty, not negative.
        limited: Never subtract more than the full penalty.
    """
    excess_B = response_lengths_B - (max_response_length - overlong_buffer_length)
    if overlong_buffer_length == 0:
        return -overlong_buffer_penalty * (excess_B > 0).double()
    share_B = (excess_B.double() / overlong_buffer_length).clamp(0.0, 1.0 if limited else None)
    return -overlong_buffer_penalty * share_B


def slope(config: RewardScalingConfig) -> float:
    """Return the change of the scaled reward per unit of reward within the source range, or 1 if scaling is off."""
    if not config.enabled:
        return 1.0
    return (config.target_max - config.target_min) / (config.source_max - config.source_min)


def stop_properly_penalty(rewards_B: Tensor, truncated_B: Tensor, coefficient: float) -> Tensor:
    """Multiply the rewards of truncated answers by `coefficient`. If it is 0, these rewards become 0."""
    return torch.where(truncated_B.bool(), rewards_B * coefficient, rewards_B)


def scale_rewards(rewards_B: Tensor, config: RewardScalingConfig) -> Tensor:
    """Apply `reward_scaling`, or return the same rewards if it is off.

    Raises:
        ConfigError: The source range is empty.
    """
    if not config.enabled:
        return rewards_B
    report_findings(check_reward_scaling(config))
    source = (config.source_min, config.source_max)
    return linear_map(rewards_B, source, (config.target_min, config.target_max))


def shape_rewards(
    rewards_B: Tensor,
    response_lengths_B: Tensor,
    truncated_B: Tensor,
    config: RewardShapingConfig,
) -> Tensor:
    """Apply `reward_shaping`, or return the same rewards if it is off.

    With `stop_properly_penalty_coef`, the rewards of truncated answers are multiplied by it. Without it, DAPO's
    overlong penalty is added.

    Args:
        rewards_B: `[B]` float.
        response_lengths_B: `[B]`, generated tokens.
        truncated_B: `[B]`, true where generation hit its limit.
        config: The section `reward_shaping` of the algorithm.

    Raises:
        ConfigError: A value that the chosen penalty needs is missing.
    """
    if not config.enabled:
        return rewards_B
    report_findings(check_reward_shaping(config))
    if config.stop_properly_penalty_coef is not None:
        return stop_properly_penalty(rewards_B, truncated_B, config.stop_properly_penalty_coef)
    longest, buffer, penalty = config.max_response_length, config.overlong_buffer_length, config.overlong_buffer_penalty
    assert longest is not None and buffer is not None and penalty is not None, "checked above"
    penalty_B = overlong_penalty(response_lengths_B, longest, buffer, penalty, config.limit_overlong_penalty)
    return rewards_B + penalty_B.to(rewards_B)


def training_rewards(trajectories: Sequence[Trajectory], config: RewardedTrainingConfig) -> Tensor:
    """Return the reward on which each sample is trained: penalised, scaled and then shaped. It is 0 without a reward.

    Returns:
        `[B]` float64, because rewards of turns are compared with them.
    """
    rewards_B = torch.tensor([t.penalized_reward or 0.0 for t in trajectories], dtype=torch.float64)
    lengths_B = torch.tensor([t.response_length for t in trajectories])
    truncated_B = torch.tensor([t.outcome == Outcome.TRUNCATED for t in trajectories])
    rewards_B = scale_rewards(rewards_B, config.reward_scaling)
    return shape_rewards(rewards_B, lengths_B, truncated_B, config.reward_shaping)


def apply_reward_shaping[BatchT: MutableMapping[str, Any]](batch: BatchT, cfg: RewardShapingConfig) -> BatchT:
    """Shape `total_reward` of a rollout batch, with lengths counted from its message logs.

    Args:
        batch: Holds `total_reward [B]`, `message_log` (a list of messages per sample; those of role
            `assistant` have `token_ids`) and, for the stop penalty, `truncated [B]`.
        cfg: The section `reward_shaping` of the algorithm.

    Returns:
        A batch of the same type with a new `total_reward`; the given one is not changed.
    """
    rewards_B = batch["total_reward"]
    response_lengths = [
        sum(len(message["token_ids"]) for message in log if message["role"] == "assistant")
        for log in batch["message_log"]
    ]
    truncated_B = batch.get("truncated", torch.zeros_like(rewards_B))
    lengths_B = torch.tensor(response_lengths, dtype=torch.int64)
    shaped_B = shape_rewards(rewards_B, lengths_B, truncated_B, cfg)
    shaped = copy.copy(batch)
    shaped["total_reward"] = shaped_B
    return shaped


def effort_penalty(trajectories: Sequence[Trajectory], levels: Mapping[str, EffortLevelConfig]) -> Tensor:
    """Return the numbers that are added to the rewards of samples, `[B]` float64, at most 0.

    For `n` tokens of thinking and the level's `budget = max_thinking_tokens`, the number is `-over_budget_penalty *
    min(max(n - budget, 0) / over_budget_tokens, 1)`. It is 0 for a level without a budget.

    Args:
        trajectories: B samples, whose `effort` and `num_thinking_tokens` are set.
    """
    penalty_B = torch.zeros(len(trajectories), dtype=torch.float64)
    lengths_B = torch.tensor([t.num_thinking_tokens or 0 for t in trajectories])
    for name, level in levels.items():
        if (budget := level.max_thinking_tokens) is None:
            continue
        ramp = level.over_budget_tokens or budget
        own_B = overlong_penalty(lengths_B, budget + ramp, ramp, level.over_budget_penalty, limited=True)
        has_level_B = torch.tensor([t.effort == name for t in trajectories])
        penalty_B = torch.where(has_level_B, own_B, penalty_B)
    return penalty_B


def effort_metrics(
    trajectories: Sequence[Trajectory], levels: Mapping[str, EffortLevelConfig], penalty_B: Tensor
) -> dict[str, float]:
    """Return the mean penalty of each level with a budget, as `effort/<level>/over_budget_penalty`."""
    metrics: dict[str, float] = {}
    for name, level in levels.items():
        own_B = torch.tensor([t.effort == name and t.reward is not None for t in trajectories])
        if level.max_thinking_tokens is not None and own_B.any():
            metrics[f"effort/{name}/over_budget_penalty"] = -float(penalty_B[own_B].mean())
    return metrics
