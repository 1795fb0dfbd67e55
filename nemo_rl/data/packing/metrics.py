"""Measures how well bins are filled.

Nothing here changes a packing.
"""

import logging
import math
from collections.abc import Sequence

logger = logging.getLogger(__name__)


class PackingMetrics:
    """Statistics of one packing, and their running totals."""

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
        """Return the totals over all packings so far; empty before the first."""
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
