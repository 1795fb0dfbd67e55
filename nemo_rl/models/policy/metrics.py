"""Reduce metrics over microbatches, ranks and optimizer updates.

Workers reduce over microbatches, the controller over ranks and updates. Invariant: losses divide their metrics by
global counts, so the parts of one update add up. A metric's name tells whether it is a count (`is_count`) or an extreme
(`interfaces.extreme_of`); all other metrics are means.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from nemo_rl.losses.loss_function import AnyLossFunction, LossType, extreme_of

_OF_THE_OPTIMIZER = ("lr", "grad_norm")


def is_count(name: str) -> bool:
    """Return whether a metric is a count, which adds up over updates and batches."""
    return name.startswith(("num_", "global_valid_", "skipped_"))


def mean_weight(name: str, loss_fn: AnyLossFunction) -> str:
    """Name the count that weights a mean: valid tokens for a mean over tokens, valid sequences for one over sequences.

    A loss with means of both kinds names those over sequences in `sequence_means`. The metrics of any other loss have
    the denominator of the loss.
    """
    loss_type = getattr(loss_fn, "loss_type", LossType.TOKEN_LEVEL)
    names = getattr(loss_fn, "sequence_means", None)
    over_sequences = loss_type is LossType.SEQUENCE_LEVEL if names is None else name in names
    return "global_valid_seqs" if over_sequences else "global_valid_toks"


def reduce_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join the metrics of parts of one global batch: sums, or extremes (`extreme_of`)."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: float((extreme_of(name) or sum)(numbers)) for name, numbers in values.items()}


def join_updates(updates: Sequence[Mapping[str, float]], loss_fn: AnyLossFunction) -> dict[str, float]:
    """Join the metrics of several optimizer updates as if they were one.

    Args:
        updates: metrics of each update, with `global_valid_seqs` and `global_valid_toks`, not both 0 in all updates.
        loss_fn: the loss; see `mean_weight`.

    Returns:
        Sums of counts, extremes, plain means of `lr` and `grad_norm`, and means over the tokens or sequences of all
        updates.
    """
    joined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if is_count(name):
            joined[name] = sum(values)
        elif extreme := extreme_of(name):
            joined[name] = extreme(values)
        elif name in _OF_THE_OPTIMIZER:
            joined[name] = statistics.fmean(values)
        else:
            joined[name] = _weighted_mean(values, [update[mean_weight(name, loss_fn)] for update in having])
    return joined


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Average values; a single value is returned bit for bit, and weights of 0 everywhere count as equal weights."""
    if len(values) == 1:
        return values[0]
    return statistics.fmean(values, weights if any(weights) else None)
