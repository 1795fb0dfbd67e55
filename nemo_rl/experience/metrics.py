"""Compute metrics of a set of trajectories, under the usual names of the field.

Invariant: means over rewards use only samples that have a reward. The number of samples without a reward is a separate
metric. The mean of no values is left out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from nemo_rl.experience.penalties import review_metrics
from nemo_rl.experience.trajectory import Ending, Outcome, Rollouts, Trajectory, is_right

OF_AN_ENVIRONMENT = (
    "num_samples",
    "reward",
    "reward_error_rate",
    "truncation_rate",
    "avg_turns_per_sample",
    "mean_gen_tokens_per_sample",
    "mean_environment_s",
    "ended_by_failure",
    "ended_by_abort",
)
"""Training metrics that are also logged for each environment, in runs with several environments."""


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, or NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan


def mean_metrics(collections: Sequence[Rollouts]) -> dict[str, float]:
    """Average each metric over the collections that report it, weighted by their numbers of trajectories."""
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for collection in collections:
        for name, value in collection.metrics.items():
            values[name].append((value, len(collection.trajectories)))
    return {name: sum(v * n for v, n in found) / sum(n for _, n in found) for name, found in values.items()}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of a training collection, logged under `train/`. Means without values are left out."""
    lengths = [t.length for t in trajectories]
    prompts = [t.num_prompt_tokens for t in trajectories]
    responses = [t.response_length for t in trajectories]
    of_environments = [
        all_ - prompt - written for all_, prompt, written in zip(lengths, prompts, responses, strict=True)
    ]
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
        "mean_total_tokens_per_sample": mean(lengths),
        "mean_env_tokens_per_sample": mean(of_environments),
        "total_num_tokens": float(sum(lengths)),
        "num_control_token_observations": float(sum(t.num_control_token_observations for t in trajectories)),
        "mean_environment_s": mean([t.environment_s for t in trajectories]),
    }
    of_parts = _endings(trajectories) | _prefix_hits(trajectories) | _component_means(trajectories)
    return _known(metrics) | of_parts | _branches(trajectories) | _agents(trajectories) | review_metrics(trajectories)


def _agents(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Sum the events between programs and the endpoint, or return no metrics in runs without programs."""
    counts = [t.agent_counts for t in trajectories if t.agent_counts]
    if not counts:
        return {}
    totals = {f"num_agent_{name}": sum(each[name] for each in counts) for name in counts[0]}
    return {"calls_per_sample": totals["num_agent_calls"] / len(counts)} | totals


def _endings(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the share of episodes that each cause ended. The shares sum to 1."""
    counts = Counter(t.ended_by for t in trajectories)
    return {f"ended_by_{ending}": counts[ending] / max(len(trajectories), 1) for ending in Ending}


def _prefix_hits(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the share of later turns for which an engine still had the cached keys and values of earlier turns."""
    later = sum(max(t.num_turns - 1, 0) for t in trajectories)
    return {"prefix_hit_rate": sum(t.num_prefix_hits for t in trajectories) / later} if later else {}


def _branches(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the number of rows and of branches per sample, or no metrics if no sample has branches."""
    counts = [len(t.branches) for t in trajectories]
    if not any(counts):
        return {}
    return {
        "num_rows": float(len(counts) + sum(counts)),
        "mean_branches_per_sample": mean(counts),
        "max_branches_per_sample": float(max(counts)),
    }


def metrics_by_environment(
    trajectories: Sequence[Trajectory], tasks: Collection[str], names: Collection[str]
) -> dict[str, float]:
    """Compute metrics for the samples of each environment, as `<environment>/<name>`.

    Args:
        trajectories: Samples of any environments.
        tasks: Names of the environments of the run. With fewer than two, no metrics are returned.
        names: Names of metrics of `rollout_metrics`.
    """
    metrics: dict[str, float] = {}
    for task in tasks if len(tasks) > 1 else ():
        own = [t for t in trajectories if t.task_name == task]
        found = rollout_metrics(own) if own else {"num_samples": 0.0}
        metrics |= {f"{task}/{name}": found[name] for name in names if name in found}
    return metrics


def _known(metrics: dict[str, float]) -> dict[str, float]:
    """Remove metrics that are NaN, which are means without values."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_components.items():
            values[name].append(value)
    return {name: mean(found) for name, found in values.items()}


def validation_metrics(trajectories: Sequence[Trajectory], num_generations: int) -> dict[str, float]:
    """Compute the metrics of a validation.

    `accuracy` is the mean reward. `pass_k` is the share of prompts with a solution. An answer solves its prompt if its
    reward is above 0. A sample whose grading failed is no solution in `pass_k` and is left out of `accuracy`.
    `num_reward_errors` counts such samples. Penalties do not change the two metrics.
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
    return _known(metrics) | review_metrics(trajectories)
