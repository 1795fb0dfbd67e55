"""Divide the prompts of each batch among data sets by their shares, without random numbers.

Invariants: with n prompts in a batch a data set of the share s gives floor(n s) or ceil(n s) of them. While shares stay
as they are, the prompts that it has given differ by less than one from its part of all prompts so far.
"""

import math
from collections.abc import Mapping, Sequence

_ROUNDING = 1e-9
"""Differences below this are rounding errors of floats."""


class Division:
    """Divides batches; each data set is owed the fraction of a prompt that earlier batches have not given.

    A batch takes the whole prompts of each part. Those that are left go to the data sets that would be owed a whole
    prompt soonest if they got none: the earliest deadline first, as for periodic tasks on several processors (Baruah
    et al., "Proportionate progress", 1996).

    Args:
        names: the data sets.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._owed = dict.fromkeys(names, 0.0)

    def next_counts(self, size: int, shares: Mapping[str, float]) -> dict[str, int]:
        """Return how many prompts of the next batch are from each data set.

        Args:
            size: prompts of the batch.
            shares: share of each data set; they sum to 1.
        """
        parts = {name: size * share for name, share in shares.items()}
        counts = {name: math.floor(part + _ROUNDING) for name, part in parts.items()}
        rates = {name: max(0.0, parts[name] - counts[name]) for name in parts}
        owed = {name: self._owed[name] + rates[name] for name in parts}
        candidates = [name for name, rate in rates.items() if rate > _ROUNDING]
        candidates.sort(key=lambda name: (owed[name] <= _ROUNDING, (1 - owed[name]) / rates[name]))
        for name in candidates[: size - sum(counts.values())]:
            counts[name] += 1
            owed[name] -= 1
        self._owed = owed
        return counts

    def state_dict(self) -> dict[str, float]:
        """Return the prompts that each data set is owed."""
        return dict(self._owed)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state; data sets that it does not have are owed nothing."""
        self._owed = {name: state.get(name, 0.0) for name in self._owed}


def evenly_spread(counts: Mapping[str, int]) -> list[str]:
    """Return each name as often as its count says, with the occurrences of each name spread over the list."""
    places = [((index + 0.5) / count, name) for name, count in counts.items() for index in range(count)]
    return [name for _, name in sorted(places, key=lambda place: place[0])]
