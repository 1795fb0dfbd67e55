"""Measure how old the weights are that sampled a batch.

Weights have versions (`Policy.weight_version`), and a trajectory says which version wrote which tokens. Invariant: a
version means the same weights before and after a resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.experience.trajectory import Trajectory


class Versioned(Protocol):
    """A model whose updates are counted."""

    weight_version: int


@dataclass(frozen=True)
class StoredVersion:
    """The version of the policy's weights, stored with the position in the data; a `stored_parts.StoredPart`."""

    policy: Versioned
    """The model under training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the version."""
        return {"version": self.policy.weight_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a stored version."""
        self.policy.weight_version = state["version"]


def age(trajectory: Trajectory, version: int) -> int:
    """Return by how many versions the oldest weights that wrote a trajectory precede `version`; 0 for no tokens."""
    return max((version - span.version for span in trajectory.all_weight_versions), default=0)


def check_staleness(trajectories: Sequence[Trajectory], version: int, max_staleness: int) -> None:
    """Check that no trajectory is older than its source states.

    Args:
        trajectories: of a step.
        version: of the policy's current weights.
        max_staleness: as `RolloutSource.max_staleness`.

    Raises:
        ValueError: a trajectory is older.
    """
    oldest = max((age(trajectory, version) for trajectory in trajectories), default=0)
    if oldest > max_staleness:
        raise ValueError(
            f"The rollout source gave a group that was sampled {oldest} weight versions ago; its max_staleness is "
            f"{max_staleness}. Drop such groups in the source, or raise its max_staleness."
        )


def stale_tokens(trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False) -> Tensor | None:
    """Mark the tokens of a batch that older weights wrote.

    Args:
        trajectories: B rows, the longest of T tokens.
        version: of the policy's current weights.
        mixes_weights: answers continue with keys and values of older weights, so that no weights alone give the
            probabilities of their later tokens; these count as written by older weights.

    Returns:
        `[B, T]` bool, where only tokens that the policy wrote have a meaning; None if all are of the current version.
    """
    if all(age(trajectory, version) == 0 for trajectory in trajectories):
        return None
    stale_BT = torch.zeros(len(trajectories), max(t.length for t in trajectories), dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.weight_versions:  # each begins where the one before it ends
            stale_BT[row, span.start :] = span.version < version or (mixes_weights and age(trajectory, version) > 0)
    return stale_BT


def num_stale_tokens(trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False) -> Tensor | None:
    """Return `stale_tokens` in short: `[B]` int64, the position after the last stale token; None if there are none."""
    ends = []
    for trajectory in trajectories:
        fresh = (span.start for span in trajectory.weight_versions if span.version >= version and not mixes_weights)
        is_stale = age(trajectory, version) > 0
        ends.append(next(fresh, trajectory.length) if is_stale else 0)
    return torch.tensor(ends) if any(ends) else None


def age_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum over trajectories of the age of the oldest weights that wrote them, in versions."""
    ages = [age(trajectory, version) for trajectory in trajectories]
    return {"avg_trajectory_age": sum(ages) / len(ages), "max_trajectory_age": float(max(ages))} if ages else {}
