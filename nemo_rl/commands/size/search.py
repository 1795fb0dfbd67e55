"""Find the sizes with the fewest estimated seconds that pass the rules, the backend's checks and the memory plan.

The candidates are checked in the order of their estimates, so most of them are never checked. Invariant: the rules of
the configuration, the training backend and its memory plan decide whether sizes are allowed, never this module.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor, log

from nemo_rl.algorithms.setup.memory_forecast import USABLE_SHARE
from nemo_rl.commands.size.candidates import Candidate, candidates, values_of
from nemo_rl.commands.size.costs import Seconds, update_seconds
from nemo_rl.commands.size.engines import engines_of_one_rank
from nemo_rl.commands.size.jobs import Job, with_values
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import MemoryPlan
from nemo_rl.utils.errors import ConfigError

HEADROOM = 0.95
"""Share of the usable memory that a proposal may need: predictions were up to 6 % too low where they were measured."""
TIE = 0.02
"""Relative difference below which estimates count as equal."""


@dataclass(frozen=True)
class Fitting:
    """A candidate that is accepted."""

    candidate: Candidate
    seconds: Seconds
    """The estimate for an update."""
    plan: MemoryPlan
    """The predicted memory of a rank."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that is not accepted."""

    candidate: Candidate
    reason: str
    """The rule that it breaks, or the memory that it lacks, in one sentence."""
    needs: float = 0.0
    """Predicted bytes of a rank; 0 if a rule decided."""


@dataclass
class Search:
    """The candidates of a job, the fastest first, and the results of their checks."""

    job: Job
    usable: float
    """Largest number of bytes of a device that the model may need."""
    _ranked: list[tuple[Candidate, Seconds]] = field(default_factory=list)
    _broken: dict[tuple[ParallelLayout, bool, int], str] = field(default_factory=dict)
    _judged: dict[Candidate, Fitting | Rejected] = field(default_factory=dict)
    _too_large: dict[tuple[ParallelLayout, str, bool], Rejected] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, headroom: float = HEADROOM) -> "Search":
        """Rank the candidates of a job by their estimates, those with offload last.

        Estimates within `TIE` are equal: then less division of the model comes first, then larger microbatches.

        Raises:
            ConfigError: the model or its backend cannot be described.
        """
        job.require_description()
        ranked = [(candidate, update_seconds(job, candidate)) for candidate in candidates(job)]
        ranked.sort(key=lambda each: _place(*each))
        return cls(job, job.gpu.memory_gib * 2**30 * USABLE_SHARE * headroom, ranked)

    @property
    def ranked(self) -> Sequence[Candidate]:
        """All candidates, the fastest first."""
        return [candidate for candidate, _ in self._ranked]

    def fitting(self, skipped: Collection[tuple[ParallelLayout, bool]] = ()) -> Iterator[Fitting]:
        """Yield the candidates that are accepted, the fastest first.

        Args:
            skipped: layouts, each with or without offload, that are left out; the caller may add some meanwhile.
        """
        for candidate, seconds in self._ranked:
            if (candidate.layout, candidate.offload) in skipped:
                continue
            judged = self.judge(candidate, seconds)
            if isinstance(judged, Fitting):
                yield judged

    def judge(self, candidate: Candidate, seconds: Seconds | None = None) -> Fitting | Rejected:
        """Check a candidate and keep the result.

        If a microbatch does not fit, larger ones of the same layout are rejected without a check.
        """
        if candidate not in self._judged:
            self._judged[candidate] = self._judge(candidate, seconds or update_seconds(self.job, candidate))
        return self._judged[candidate]

    def closest(self) -> Rejected | None:
        """Return the candidate with too little room that needs the least memory; None if rules refuse all of them."""
        least = [self.judge(candidate) for candidate in self._smallest()]
        without_room = [each for each in least if isinstance(each, Rejected) and each.needs]
        return min(without_room, key=lambda each: each.needs, default=None)

    def refusal(self) -> str:
        """Return a rule that refuses a candidate, for searches in which all are refused."""
        nothing = "no layout divides the ranks" if self.job.ranks > 0 else "other models and engines leave it no GPU"
        return next(filter(None, self._broken.values()), nothing)

    def has_room(self) -> bool:
        """Return whether one of the candidates that need the least memory fits, without offload."""
        return any(isinstance(self.judge(candidate), Fitting) for candidate in self._smallest())

    def _smallest(self) -> list[Candidate]:
        """Return the candidates with the smallest microbatch and everything computed again, without offload."""
        hows = {candidate.recompute for candidate in self.ranked}
        most = "full" if "full" in hows else "none"
        rows = min((candidate.rows for candidate in self.ranked), default=1)
        return [each for each in self.ranked if (each.rows, each.recompute, each.offload) == (rows, most, False)]

    def _judge(self, candidate: Candidate, seconds: Seconds) -> Fitting | Rejected:
        layout, section = candidate.layout, self.job.section
        packs = section.sequence_packing.enabled or section.dynamic_batching.enabled
        ruled = (layout, candidate.offload, 0 if packs else candidate.rows)  # what rules depend on
        if ruled not in self._broken:
            self._broken[ruled] = self._broken_rule(candidate)
        if self._broken[ruled]:
            return Rejected(candidate, self._broken[ruled])
        kind = (layout, candidate.recompute, candidate.offload)
        known = self._too_large.get(kind)
        if known is not None and candidate.rows >= known.candidate.rows:
            return Rejected(candidate, known.reason, known.needs)
        changed = with_values(self.job.config, values_of(self.job, candidate))
        plan = self.job.plan(getattr(changed, self.job.name))
        if plan.peak <= self.usable:
            return Fitting(candidate, seconds, plan)
        self._too_large[kind] = Rejected(
            candidate,
            f"needs {plan.peak / 2**30:.1f} GiB of the {self.usable / 2**30:.1f} GiB that a proposal may use",
            plan.peak,
        )
        return self._too_large[kind]

    @cached_property
    def _of_others(self) -> frozenset[str]:
        """The findings before sizes of a model next to the policy change: those of the policy are found later."""
        job = self.job
        if job.name == "policy":
            return frozenset()
        found = with_values(job.config, engines_of_one_rank(job.config)).findings()
        return frozenset(text for text in found if job.name not in text)

    def _broken_rule(self, candidate: Candidate) -> str:
        """Return the first rule that a layout breaks, whatever the engines' own sizes; empty if it breaks none."""
        job = self.job
        changed = with_values(job.config, engines_of_one_rank(job.config) | values_of(job, candidate))
        found = next((text for text in changed.findings() if text not in self._of_others), None)
        if found is None:
            try:
                job.backend.check_sizes(getattr(changed, job.name), job.ranks, job.name)
            except ConfigError as error:
                found = str(error)
        lines = [line.strip() for line in (found or "").strip().splitlines()]
        return next((line for line in lines if not line.endswith("problems:")), found or "")  # not the head of a list


def _place(candidate: Candidate, seconds: Seconds) -> tuple[float, ...]:
    bucket = floor(log(seconds.total) / log(1 + TIE))
    return candidate.offload, bucket, candidate.divisions(), -candidate.rows, seconds.total
