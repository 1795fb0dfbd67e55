"""Penalties for more thinking than the effort level of a prompt allows.

Legend: `B` samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl.algorithms.credit.reward_shaping import overlong_penalty
from nemo_rl.config import EffortLevelConfig
from nemo_rl.experience.trajectory import Trajectory


def effort_penalty(trajectories: Sequence[Trajectory], levels: Mapping[str, EffortLevelConfig]) -> Tensor:
    """Return what is added to the rewards of samples, `[B]` float64, at most 0.

    With `n` tokens of thinking, the budget `max_thinking_tokens` and `over_budget_tokens`, it is
    `-over_budget_penalty * min(max(n - budget, 0) / over_budget_tokens, 1)`; 0 for a level without a budget.

    Args:
        trajectories: B samples, whose `effort` and `num_thinking_tokens` are set.
        levels: the section `effort_levels`.
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
