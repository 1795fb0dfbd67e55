"""Compute the shares of data sets from the number of finished steps and the policy's accuracy on each data set.

    weight of the phase, or of the entry ─► x closeness of the recent accuracy to the target ─► share >= min_share

Invariant: shares depend only on the configuration and on the state, which changes only when a step is finished.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config import AccuracyRuleConfig, CurriculumConfig, CurriculumPhase


class MovingAverage:
    """Average in which each new value multiplies the weights of earlier values by 1 - 1/length.

    Args:
        length: limit of the sum of weights for many values.
    """

    def __init__(self, length: int) -> None:
        self._keeps = 1 - 1 / length
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float | None:
        """The average, or None before the first value."""
        return self._sum / self._weight if self._weight else None

    def add(self, value: float) -> None:
        """Add a value."""
        self._sum = self._keeps * self._sum + value
        self._weight = self._keeps * self._weight + 1

    def state_dict(self) -> list[float]:
        """Return the weighted sum of the values, and the sum of their weights."""
        return [self._sum, self._weight]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore a state."""
        self._sum, self._weight = state


class Curriculum:
    """The shares of data sets, and the state on which they depend.

    Args:
        weights: weight of each data set, used if the configuration has no phases.
        config: the section `data.curriculum`. If None, the weights are used unchanged.
    """

    def __init__(self, weights: Mapping[str, float], config: CurriculumConfig | None = None) -> None:
        self._weights = dict(weights)
        self._config = config or CurriculumConfig()
        self._rule = self._config.accuracy or AccuracyRuleConfig()
        self._recent = {name: MovingAverage(self._rule.average_over) for name in weights}
        self._num_steps = 0

    def shares(self) -> dict[str, float]:
        """Return the share of each data set in the next prompts. The shares sum to 1."""
        weights = self._phase_weights() if self._config.phases else self._weights
        if self._config.accuracy is None:
            return _normalised(weights)
        return self._by_accuracy(weights, self._config.accuracy)

    def finish_step(self, step: int, rewards: Sequence[tuple[str, Sequence[float]]]) -> None:
        """Note that a step was trained on.

        Args:
            step: number of the step, from 1.
            rewards: name of the data set and rewards of the samples, for each group of the step, in order.
        """
        self._num_steps = step
        for name, of_group in rewards:
            if of_group:
                self._recent[name].add(self.accuracy(of_group))

    def accuracy(self, rewards: Sequence[float]) -> float:
        """Return the share of solved samples."""
        return sum(reward > self._rule.solved_above for reward in rewards) / len(rewards)

    def metrics(self) -> dict[str, float]:
        """Return `target_share/<name>` and, if it is known, `recent_accuracy/<name>`."""
        recent = {name: average.value for name, average in self._recent.items()}
        known = {f"recent_accuracy/{name}": value for name, value in recent.items() if value is not None}
        return {f"target_share/{name}": share for name, share in self.shares().items()} | known

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished steps, and the moving averages."""
        recent = {name: average.state_dict() for name, average in self._recent.items()}
        return {"num_steps": self._num_steps, "recent": recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Data sets that are not in the state start without an accuracy."""
        self._num_steps = state["num_steps"]
        for name in self._recent.keys() & state["recent"].keys():
            self._recent[name].load_state_dict(state["recent"][name])

    def _phase_weights(self) -> Mapping[str, float]:
        phases = self._config.phases
        index = bisect([phase.from_step for phase in phases], self._num_steps) - 1
        if self._config.interpolation == "none" or index + 1 == len(phases):
            return phases[index].weights
        return _between(phases[index], phases[index + 1], self._num_steps)

    def _by_accuracy(self, weights: Mapping[str, float], rule: AccuracyRuleConfig) -> dict[str, float]:
        """Multiply weights by the closeness of accuracies to the target, and give each at least `min_share`.

        If no accuracy is close to the target, weights do not change. A data set without accuracy is treated as close.
        """
        farthest = max(rule.target, 1 - rule.target)
        recent = {name: self._recent[name].value for name in weights}
        gaps = {name: 0.0 if value is None else abs(value - rule.target) for name, value in recent.items()}
        scaled = {name: weight * max(0.0, 1 - gaps[name] / farthest) for name, weight in weights.items()}
        shares = _normalised(scaled if any(scaled.values()) else weights)
        drawn = [name for name, weight in weights.items() if weight]
        rest = 1 - rule.min_share * len(drawn)
        return {name: rule.min_share + rest * share if name in drawn else 0.0 for name, share in shares.items()}


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _between(before: CurriculumPhase, after: CurriculumPhase, step: int) -> dict[str, float]:
    """Interpolate between the normalised weights of two phases. Their weights may have different sums."""
    done = (step - before.from_step) / (after.from_step - before.from_step)
    first, last = _normalised(before.weights), _normalised(after.weights)
    return {name: (1 - done) * first[name] + done * last[name] for name in first}
