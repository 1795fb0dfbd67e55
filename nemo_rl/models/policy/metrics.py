"""Reduce metrics over microbatches, ranks and optimizer updates.

Shared by the workers (microbatches) and the controller (ranks, updates). Law: losses divide their
metrics by global counts, so parts add up; only names ending in `_min` or `_max` are extremes.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor


def reduce_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join the metrics of parts of one global batch: sums, or extremes for `_min` and `_max`."""
    return _reduce(parts, sum)


def average_updates(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of several optimizer updates: means, or extremes for `_min` and `_max`."""
    return _reduce(updates, lambda values: sum(values) / len(values))


def _reduce(parts: Iterable[Mapping[str, Tensor | float]], join: Callable[[list[float]], float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: float(_joiner(name, join)(numbers)) for name, numbers in values.items()}


def _joiner(name: str, join: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    if name.endswith("_min"):
        return min
    if name.endswith("_max"):
        return max
    return join
