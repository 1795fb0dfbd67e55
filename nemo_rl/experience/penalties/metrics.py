"""Metrics of reviewed answers: how many are penalised by what, and reward and length by level of effort.

Invariant: means are over samples with a reward, so that they do not change with the number of failures.
"""

from collections.abc import Sequence
from statistics import fmean

from nemo_rl.experience.trajectory import Trajectory


def review_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of samples, none of them if the run has neither penalties nor levels.

    `penalized_by_<name>` is the share of the reviewed samples to which a penalty applies, `penalized_rate` that of
    samples to which any applies, `penalized_reward` the mean reward after penalties.
    """
    reviewed = [t for t in trajectories if t.num_thinking_tokens is not None]
    if not reviewed:
        return {}
    metrics = {
        "malformed_thinking_rate": fmean(bool(t.malformed_thinking) for t in reviewed),
        "mean_thinking_tokens": fmean(t.num_thinking_tokens or 0 for t in reviewed),
    }
    names = dict.fromkeys(name for t in reviewed for name in t.penalties)
    metrics |= {f"penalized_by_{name}": fmean(bool(t.penalties.get(name)) for t in reviewed) for name in names}
    if names:
        metrics["penalized_rate"] = fmean(t.is_penalized for t in reviewed)
        metrics["penalized_reward"] = fmean(t.penalized_reward or 0.0 for t in reviewed)
    return metrics | _by_effort(reviewed)


def _by_effort(reviewed: Sequence[Trajectory]) -> dict[str, float]:
    """Compute number, reward and lengths of the samples of each level, as `effort/<level>/<name>`."""
    metrics: dict[str, float] = {}
    for level in sorted({t.effort for t in reviewed if t.effort is not None}):
        own = [t for t in reviewed if t.effort == level]
        found = {
            "num_samples": float(len(own)),
            "reward": fmean(t.reward or 0.0 for t in own),
            "mean_gen_tokens_per_sample": fmean(t.response_length for t in own),
            "mean_thinking_tokens": fmean(t.num_thinking_tokens or 0 for t in own),
        }
        metrics |= {f"effort/{level}/{name}": value for name, value in found.items()}
    return metrics
