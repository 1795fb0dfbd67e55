"""Pack sequences into bins with little unused space.

Invariant: every sequence is in exactly one bin, no bin exceeds its capacity, and the same lengths always give the
same bins.
"""

import enum
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Sequence

from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)


class PackingMetrics:
    """Statistics of one packing, and totals over all packings so far."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self._num_calls = 0
        self._num_sequences = 0
        self._num_bins = 0
        self._num_tokens = 0
        self._bin_tokens = 0
        self._packing_time_s = 0.0
        self._utilization: list[float] = []

    def update(
        self,
        sequence_lengths: Sequence[int],
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
        packing_time: float | None = None,
    ) -> dict[str, float]:
        """Add one packing to the totals and return its own statistics."""
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        self._num_calls += 1
        self._num_sequences += len(sequence_lengths)
        self._num_bins += len(bins)
        self._num_tokens += sum(sequence_lengths)
        self._bin_tokens += len(bins) * bin_capacity
        self._packing_time_s += packing_time or 0.0
        self._utilization.append(stats["average_utilization"])
        if packing_time is not None:
            stats["packing_time"] = packing_time
        return stats

    def calculate_stats_only(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Return the statistics of one packing, without adding it to the totals.

        Returns:
            `num_sequences`, `num_bins`, `total_tokens`; `average_utilization` (tokens over bins x
            capacity, 0 to 1); `waste_ratio` (1 - utilization); `min_bin_tokens`, `max_bin_tokens`,
            `bin_balance` (min over max); `packing_efficiency` (fewest bins that could hold the
            tokens, over the bins used).
        """
        loads = [sum(sequence_lengths[i] for i in rows) for rows in bins]
        total = sum(loads)
        room = len(bins) * bin_capacity
        utilization = total / room if room else 0.0
        fewest = math.ceil(total / bin_capacity) if bin_capacity else 0
        return {
            "num_sequences": float(len(sequence_lengths)),
            "num_bins": float(len(bins)),
            "total_tokens": float(total),
            "average_utilization": utilization,
            "waste_ratio": 1.0 - utilization,
            "min_bin_tokens": float(min(loads, default=0)),
            "max_bin_tokens": float(max(loads, default=0)),
            "bin_balance": min(loads, default=0) / max(max(loads, default=0), 1),
            "packing_efficiency": fewest / len(bins) if bins else 0.0,
        }

    def get_aggregated_stats(self) -> dict[str, float]:
        """Return the totals over all packings so far, or an empty mapping before the first."""
        if not self._num_calls:
            return {}
        overall = self._num_tokens / self._bin_tokens if self._bin_tokens else 0.0
        return {
            "num_packings": float(self._num_calls),
            "total_sequences": float(self._num_sequences),
            "total_bins": float(self._num_bins),
            "total_tokens": float(self._num_tokens),
            "average_utilization": overall,
            "waste_ratio": 1.0 - overall,
            "min_utilization": min(self._utilization),
            "max_utilization": max(self._utilization),
            "average_packing_time": self._packing_time_s / self._num_calls,
        }

    def print_aggregated_stats(self) -> None:
        """Log the totals as one line."""
        stats = self.get_aggregated_stats()
        logger.info("Packing: %s", ", ".join(f"{k}={v:.4g}" for k, v in stats.items()) or "none")


class PackingAlgorithm(enum.Enum):
    """Names that `get_packer` accepts."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePacker(ABC):
    """Pack sequences into bins of equal capacity.

    Args:
        bin_capacity: Number of tokens that fit into a bin.
        collect_metrics: Whether to keep statistics of every `pack` call.
        min_bin_count: Smallest number of bins.
        bin_count_multiple: The number of bins is a multiple of this number.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        for name, value in (
            ("bin_capacity", bin_capacity),
            ("min_bin_count", min_bin_count),
            ("bin_count_multiple", bin_count_multiple),
        ):
            if value is not None and value < 1:
                raise DataError(f"{name}={value}: a packer needs at least 1.")
        self.bin_capacity = bin_capacity
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count or 1
        self.bin_count_multiple = bin_count_multiple or 1
        self.metrics = PackingMetrics()

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Return the bins, each a list of indices into `sequence_lengths`.

        Raises:
            DataError: A sequence is longer than the capacity, or there are fewer sequences than
                requested bins.
        """
        self._check(sequence_lengths)
        started = time.perf_counter()
        bins = self._pack(sequence_lengths)
        wanted = max(len(bins), self.min_bin_count)
        wanted = math.ceil(wanted / self.bin_count_multiple) * self.bin_count_multiple
        spread_bins(bins, sequence_lengths, wanted)
        if self.collect_metrics:
            elapsed_s = time.perf_counter() - started
            self.metrics.update(sequence_lengths, bins, self.bin_capacity, elapsed_s)
        return bins

    @abstractmethod
    def _pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Pack sequences that fit into bins, for any number of bins."""

    def _check(self, sequence_lengths: Sequence[int]) -> None:
        too_long = [(i, n) for i, n in enumerate(sequence_lengths) if n > self.bin_capacity]
        if too_long:
            rows = ", ".join(f"row {i} has {n}" for i, n in too_long[:5])
            more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
            raise DataError(
                f"{len(too_long)} of {len(sequence_lengths)} sequences are longer than the "
                f"{self.bin_capacity} tokens that fit into one bin: {rows}{more}. "
                "Raise the tokens per microbatch or shorten the sequences."
            )

    def reset_metrics(self) -> None:
        """Reset the statistics."""
        self.metrics.reset()

    def compute_metrics(self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the statistics of one packing (`PackingMetrics.calculate_stats_only`)."""
        return self.metrics.calculate_stats_only(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Return the totals over the `pack` calls if `collect_metrics` is set."""
        return self.metrics.get_aggregated_stats()

    def print_metrics(self) -> None:
        """Log the totals."""
        self.metrics.print_aggregated_stats()


class ConcatenativePacker(SequencePacker):
    """Fill a bin in the given order. Open the next bin when a sequence does not fit."""

    def _pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        room = 0
        for index, length in enumerate(sequence_lengths):
            if not bins or length > room:
                bins.append([])
                room = self.bin_capacity
            bins[-1].append(index)
            room -= length
        return bins


class FirstFitPacker(SequencePacker):
    """Put each sequence into the first bin with space, in an order that subclasses choose."""

    def _order(self, sequence_lengths: Sequence[int]) -> list[int]:
        return list(range(len(sequence_lengths)))

    def _pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        return _first_fit(self._order(sequence_lengths), sequence_lengths, self.bin_capacity)


class FirstFitDecreasingPacker(FirstFitPacker):
    """First fit with the longest sequence first, which needs at most 11/9 of the fewest bins plus 6/9 (Dosa 2007)."""

    def _order(self, sequence_lengths: Sequence[int]) -> list[int]:
        return sorted(range(len(sequence_lengths)), key=lambda i: (-sequence_lengths[i], i))


class FirstFitShufflePacker(FirstFitPacker):
    """First fit in a shuffled order that depends only on the number of sequences."""

    SHUFFLE_SEED = 0

    def _order(self, sequence_lengths: Sequence[int]) -> list[int]:
        order = list(range(len(sequence_lengths)))
        random.Random(self.SHUFFLE_SEED).shuffle(order)
        return order


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Pack with modified first fit decreasing, which needs at most 71/60 of the optimal number of bins plus 1.

    See Johnson and Garey, "A 71/60 theorem for bin packing" (1985). Sequences are large (over half of the capacity),
    medium (over a third), small (over a sixth) or tiny. Each large sequence opens a bin. These bins are filled with
    medium sequences and pairs of small ones. The remaining sequences are packed with first fit decreasing.
    """

    def _pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        capacity = self.bin_capacity
        large: list[tuple[int, int]] = []
        medium: list[tuple[int, int]] = []
        small: list[tuple[int, int]] = []
        tiny: list[tuple[int, int]] = []
        for index, length in enumerate(sequence_lengths):
            if 2 * length > capacity:
                insort(large, (length, -index))
            elif 3 * length > capacity:
                insort(medium, (length, -index))
            elif 6 * length > capacity:
                insort(small, (length, -index))
            else:
                insort(tiny, (length, -index))
        bins = [[item] for item in reversed(large)]
        without_medium = _add_mediums(bins, medium, capacity)
        _add_small_pairs(without_medium, small, capacity)
        rest = sorted(medium + small + tiny)
        for rows in bins:
            _fill(rows, rest, capacity)
        packed = [[-negative for _, negative in rows] for rows in bins]
        leftover = [-negative for _, negative in reversed(rest)]
        return packed + _first_fit(leftover, sequence_lengths, capacity)


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """Return the packer of this name (upper or lower case).

    Raises:
        DataError: There is no such algorithm.
    """
    if isinstance(algorithm, str):
        names = {member.value: member for member in PackingAlgorithm}
        if algorithm.lower() not in names:
            raise DataError(f"sequence packing algorithm {algorithm!r} is unknown; choose one of {', '.join(names)}.")
        algorithm = names[algorithm.lower()]
    return _PACKERS[algorithm](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)


def spread_bins(bins: list[list[int]], costs: Sequence[int], num_bins: int) -> None:
    """Split bins in place until there are `num_bins`: always the most expensive one with several rows.

    Raises:
        DataError: There are fewer rows than requested bins.
    """
    num_rows = sum(len(rows) for rows in bins)
    if num_rows < num_bins:
        raise DataError(
            f"{num_rows} sequences do not divide into {num_bins} bins of at least one each. "
            "Use a number of sequences divisible by the number of data-parallel ranks."
        )
    while len(bins) < num_bins:
        splittable = (i for i, rows in enumerate(bins) if len(rows) > 1)
        heaviest = max(splittable, key=lambda i: (sum(costs[row] for row in bins[i]), -i))
        kept, moved = _halve(bins[heaviest], costs)
        bins[heaviest] = kept
        bins.append(moved)


def _halve(rows: list[int], costs: Sequence[int]) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for row in sorted(rows, key=lambda r: (-costs[r], r)):
        lighter = 0 if (loads[0], len(halves[0])) <= (loads[1], len(halves[1])) else 1
        halves[lighter].append(row)
        loads[lighter] += costs[row]
    return halves


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for index in order:
        length = lengths[index]
        for number, left in enumerate(free):
            if length <= left:
                bins[number].append(index)
                free[number] -= length
                break
        else:
            bins.append([index])
            free.append(capacity - length)
    return bins


def _room(rows: list[tuple[int, int]], capacity: int) -> int:
    return capacity - sum(length for length, _ in rows)


def _pop_largest_fitting(items: list[tuple[int, int]], room: int) -> tuple[int, int] | None:
    """Remove the longest item of length at most `room` from `items` (sorted, shortest first), and return the item."""
    position = bisect_right(items, (room, 1))
    return items.pop(position - 1) if position else None


def _add_mediums(
    bins: list[list[tuple[int, int]]], medium: list[tuple[int, int]], capacity: int
) -> list[list[tuple[int, int]]]:
    """Add to each bin, from the first on, the longest medium item that fits. Return the bins that got none."""
    without = []
    for rows in bins:
        item = _pop_largest_fitting(medium, _room(rows, capacity))
        if item is None:
            without.append(rows)
        else:
            rows.append(item)
    return without


def _add_small_pairs(bins: list[list[tuple[int, int]]], small: list[tuple[int, int]], capacity: int) -> None:
    """Add two small items to each bin, from the last bin on: the shortest item, and the longest that still fits."""
    for rows in reversed(bins):
        room = _room(rows, capacity)
        if len(small) < 2 or small[0][0] + small[1][0] > room:
            continue
        rows.append(small.pop(0))
        partner = _pop_largest_fitting(small, _room(rows, capacity))
        assert partner is not None
        rows.append(partner)


def _fill(rows: list[tuple[int, int]], rest: list[tuple[int, int]], capacity: int) -> None:
    """Add the longest item that fits, until none fits."""
    while (item := _pop_largest_fitting(rest, _room(rows, capacity))) is not None:
        rows.append(item)
