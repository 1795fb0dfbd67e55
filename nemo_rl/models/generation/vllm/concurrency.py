"""Fit the number of running requests to the key-value cache of a vLLM engine.

vLLM starts as many requests as have space in the cache for their tokens so far. The requests grow. When the cache is
full, vLLM takes one out (a preemption), drops its keys and values, and computes them again later. With long answers
this repeats, because restarted requests take the space of requests about to end. This module changes the limit:

    more preemptions than a quarter of the running requests     the limit becomes the number that still runs
    as many requests as the limit have ended, with at most      the limit rises, by one or as far as the cache had
    half as many preemptions as that                            room, at most twofold

A few preemptions remain, because a cache that is always full gives more answers per second than one with space for the
longest answers. Other requests wait in vLLM's queue, in order. Invariant: without a preemption, the limit is vLLM's own
(`max_num_seqs`).
"""

from dataclasses import dataclass, field
from typing import Any

from nemo_rl.models.generation.engine_load import EngineLoad

_FULL = 0.9
"""Usage of the cache up to which the limit may rise by more than one."""
_TOLERATED = 0.25
"""Tolerated number of preemptions per running request."""


@dataclass
class ConcurrencyLimit:
    """Limit of the number of concurrent requests."""

    most: int
    """Largest limit."""
    limit: int = field(init=False)
    _num_ended: int = field(default=0, init=False)
    """Number of requests since the last change that ended in steps with as many requests as allowed."""
    _num_preemptions: int = field(default=0, init=False)
    """Number of preemptions since the last change of the limit."""
    _peak: float = field(default=0.0, init=False)
    """Largest usage of the cache since the last change of the limit."""

    def __post_init__(self) -> None:
        self.limit = self.most

    def note_step(self, *, num_preemptions: int, num_running: int, num_ended: int, usage: float) -> None:
        """Adapt the limit after a step of the engine.

        Args:
            num_preemptions: Number of requests that were preempted in the step.
            num_running: Number of requests that run after the step.
            num_ended: Number of requests that ended in the step.
            usage: Share of the cache in use.
        """
        self._num_preemptions += num_preemptions
        if num_preemptions and self._num_preemptions > _TOLERATED * num_running:
            self._change(max(1, min(self.limit, num_running)))
            return
        num_allowed = min(self.limit, num_running + num_ended) if self.limit == self.most else self.limit
        if num_running + num_ended >= num_allowed:
            self._num_ended += num_ended
            self._peak = max(self._peak, usage)
            if self._num_ended >= num_allowed:
                self._change(min(self.most, self.limit + self._rise()))

    def _rise(self) -> int:
        """Return the number by which the limit may rise."""
        if self._num_preemptions > _TOLERATED * self.limit / 2:
            return 0
        fits = int(self.limit * min(2.0, _FULL / max(self._peak, 1e-3)))
        return max(1, fits - self.limit)

    def _change(self, limit: int) -> None:
        self.limit, self._num_ended, self._num_preemptions, self._peak = limit, 0, 0, 0.0


class CacheWatch:
    """Count preemptions in the steps of an engine, and limit its running requests."""

    def __init__(self, scheduler: Any):
        self.limit = ConcurrencyLimit(scheduler.max_num_active_reqs)
        self._scheduler = scheduler
        self._num_preempted = 0
        self._before_step = 0
        self._load = EngineLoad()
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._count

    def _count(self, *arguments: Any, **options: Any) -> None:
        self._num_preempted += 1
        self._preempt(*arguments, **options)

    def begin_step(self) -> None:
        """Note the start of a step. Preemptions between steps, for new weights, are not counted."""
        self._before_step = self._num_preempted

    def end_step(self, num_ended: int) -> None:
        """Note the end of a step in which `num_ended` requests ended."""
        num_preemptions = self._num_preempted - self._before_step
        usage = self._scheduler.get_kv_cache_usage()
        num_running, _ = self._scheduler.get_request_counts()
        self.limit.note_step(num_preemptions=num_preemptions, num_running=num_running, num_ended=num_ended, usage=usage)
        self._scheduler.max_num_active_reqs = self.limit.limit
        self._load = EngineLoad(
            self._load.num_preemptions + num_preemptions, max(self._load.kv_cache_usage, usage), self.limit.limit
        )

    def take_load(self) -> EngineLoad:
        """Return the load since the last call."""
        load, self._load = self._load, EngineLoad(max_running=self.limit.limit)
        return load
