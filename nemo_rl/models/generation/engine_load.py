"""Define the load of an engine between two reports, and the metrics of all engines.

Invariant: counts of consecutive reports add up, so no token is counted twice or lost.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SpeculationCounts(NamedTuple):
    """Counts of speculative decoding. A pass is a forward pass of the model for one request."""

    num_passes: int = 0
    """Number of passes that yielded tokens, with and without proposals."""
    num_tokens: int = 0
    """Number of tokens that these passes yielded."""
    num_drafts: int = 0
    """Number of passes that verified proposals."""
    num_proposed: int = 0
    """Number of proposed tokens."""
    num_accepted: int = 0
    """Number of proposed tokens that were accepted for a response."""

    def plus(self, other: "SpeculationCounts") -> "SpeculationCounts":
        """Add the counts of another engine or of a later report."""
        return SpeculationCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return the rates. The acceptance rate is 0 without proposals."""
        return {
            "spec_acceptance_rate": self.num_accepted / max(1, self.num_proposed),
            "spec_accepted_length": self.num_accepted / max(1, self.num_drafts),
            "spec_tokens_per_pass": self.num_tokens / max(1, self.num_passes),
            "spec_proposed_tokens": float(self.num_proposed),
        }


class EngineLoad(NamedTuple):
    """Load of an engine since its last report."""

    num_preemptions: int = 0
    """Number of running requests that were preempted because the key-value cache was full."""
    kv_cache_usage: float = 0.0
    """Largest share of the key-value cache in use."""
    max_running: int = 0
    """Largest number of requests that the engine can run concurrently now. 0 if unknown."""
    speculation: SpeculationCounts | None = None
    """Counts of speculative decoding. None if it is off."""

    def plus(self, later: "EngineLoad") -> "EngineLoad":
        """Combine this load with the next load of the same engine."""
        return EngineLoad(
            self.num_preemptions + later.num_preemptions,
            max(self.kv_cache_usage, later.kv_cache_usage),
            later.max_running,
            _sum([self, later]),
        )


def load_metrics(loads: Sequence[EngineLoad]) -> dict[str, float]:
    """Return the metrics of several engines (`interfaces.GenerationInterface.load_metrics`)."""
    if not loads:
        return {}
    metrics = {
        "num_preemptions": float(sum(load.num_preemptions for load in loads)),
        "kv_cache_usage": max(load.kv_cache_usage for load in loads),
        "max_running_requests": float(min(load.max_running for load in loads)),
    }
    speculation = _sum(loads)
    return metrics if speculation is None else metrics | speculation.metrics()


def _sum(loads: Sequence[EngineLoad]) -> SpeculationCounts | None:
    total: SpeculationCounts | None = None
    for load in loads:
        if load.speculation is not None:
            total = load.speculation if total is None else total.plus(load.speculation)
    return total
