"""Compute metrics of a set of trajectories, under the field's names.

Invariant: means over rewards use only samples that have one; how many have none is a separate metric; a mean of nothing
is left out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from nemo_rl.experience.trajectory import Outcome, Rollouts, Trajectory, is_right


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, NaN for no values."""
    return sum(values) / len(values) if values else math.nan


def mean_metrics(collections: Sequence[Rollouts]) -> dict[str, float]:
    """Join metrics of several collections: for each, the mean over those that have it, weighted by trajectories."""
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for collection in collections:
        for name, value in collection.metrics.items():
            values[name].append((value, len(collection.trajectories)))
    return {name: sum(v * n for v, n in found) / sum(n for _, n in found) for name, found in values.items()}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of a training collection, logged under `train/`; those of rewards only if there is one."""
    responses = [t.response_length for t in trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    outcomes = Counter(t.outcome for t in trajectories)
    count = max(len(trajectories), 1)
    failed = outcomes[Outcome.REWARD_ERROR]
    metrics = {
        "num_samples": float(len(trajectories)),
        "reward": mean(rewards),
        "mean_total_reward": mean(rewards),
        "max_total_reward": max(rewards, default=math.nan),
        "min_total_reward": min(rewards, default=math.nan),
        "reward_error_rate": failed / count,
        "num_reward_errors": float(failed),
        "truncation_rate": outcomes[Outcome.TRUNCATED] / count,
        "natural_termination_rate": outcomes[Outcome.FINISHED] / count,
        "prompt_too_long_rate": outcomes[Outcome.PROMPT_TOO_LONG] / count,
        "total_turns": float(sum(t.num_turns for t in trajectories)),
        "avg_turns_per_sample": mean([t.num_turns for t in trajectories]),
        "max_turns_per_sample": float(max((t.num_turns for t in trajectories), default=0)),
        "mean_prompt_length": mean([t.prompt_length for t in trajectories]),
        "mean_gen_tokens_per_sample": mean(responses),
        "max_gen_tokens_per_sample": float(max(responses, default=0)),
        "mean_total_tokens_per_sample": mean([t.length for t in trajectories]),
        "mean_env_tokens_per_sample": mean([t.length - t.prompt_length - t.response_length for t in trajectories]),
        "total_num_tokens": float(sum(t.length for t in trajectories)),
        "num_control_token_observations": float(sum(t.num_control_token_observations for t in trajectories)),
        "mean_environment_s": mean([t.environment_s for t in trajectories]),
    }
    return _known(metrics) | _component_means(trajectories)


def _known(metrics: dict[str, float]) -> dict[str, float]:
    """Leave out the means of nothing."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_components.items():
            values[name].append(value)
    return {name: mean(found) for name, found in values.items()}


def validation_metrics(trajectories: Sequence[Trajectory], num_generations: int) -> dict[str, float]:
    """Compute the metrics of a validation.

    `accuracy` is the mean reward, `pass_k` the share of prompts that are solved at least once. An answer solves its
    prompt if its reward is above 0. A sample whose grading failed counts as not solved in `pass_k` and is left out of
    `accuracy`; `num_reward_errors` counts such samples.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics = {
        "accuracy": mean(rewards),
        "avg_length": mean([t.response_length for t in trajectories]),
        "num_samples": float(len(trajectories)),
        "num_reward_errors": float(sum(t.outcome == Outcome.REWARD_ERROR for t in trajectories)),
        "truncation_rate": mean([float(t.outcome == Outcome.TRUNCATED) for t in trajectories]),
    }
    if num_generations > 1:
        solved: dict[int, bool] = defaultdict(bool)
        for trajectory in trajectories:
            solved[trajectory.group_index] |= is_right(trajectory.reward)
        metrics["pass_k"] = mean([float(value) for value in solved.values()])
    return _known(metrics)
