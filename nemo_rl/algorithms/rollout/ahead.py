"""Sample groups ahead of the step that trains on them.

    step s:  start groups ─► take the batch of s ─► start groups ─► training of s, while engines sample on
             room for (age + 1) x B                 room for age x B

A prompt is started only if its group can still be trained on within `max_age_steps`, so no group is ever dropped.
Counting is enough for this: each step takes B groups, and a group that was started in step s has to be taken by step
s + age. Invariants: each started group is given exactly once; a group that has to be taken in a step is.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.algorithms.rollout.source import FreshRollouts, Group, RolloutSource
from nemo_rl.config import OverlapConfig, RolloutTrainingConfig
from nemo_rl.data.prompt_stream import DataExhausted, PromptBatch, PromptPosition
from nemo_rl.experience.event_loop import BackgroundTask, wait_for_any
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.runners.stored import whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError

logger = logging.getLogger(__name__)

_NO_LIMIT = contextlib.nullcontext()


@dataclass(frozen=True)
class _Prompt:
    """One drawn prompt: its batch, its row there, and the name of the batch's collection."""

    batch: PromptBatch
    row: int
    key: RolloutKey

    @property
    def position(self) -> PromptPosition:
        return self.batch.positions[self.row]


@dataclass(eq=False)
class OpenGroup:
    """A group that was started and not given yet.

    Attributes:
        number: groups that were started before it.
        last_step: the last step that may train on it.
        position: its prompt in the data.
        task: samples it in the background; None for a group of a checkpoint.
        rollouts: its samples, once they are finished.
    """

    number: int
    last_step: int
    position: PromptPosition
    task: BackgroundTask[Rollouts] | None = None
    rollouts: Rollouts | None = None

    @property
    def is_finished(self) -> bool:
        """True if no wait is needed to give it."""
        return self.task is None or self.task.is_done

    @property
    def has_failed(self) -> bool:
        """True if it has no samples, because sampling failed."""
        return self.task is not None and self.task.failure is not None

    def finished(self, timeout_s: float) -> Rollouts:
        """Wait for the samples and return them; raises what `BackgroundTask.result` raises."""
        if self.rollouts is None:
            assert self.task is not None
            self.rollouts = self.task.result(timeout_s)
        return self.rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; only for a finished group."""
        rollouts = self.finished(timeout_s=0.0)
        return {
            "number": self.number,
            "last_step": self.last_step,
            "position": list(self.position),
            "trajectories": [trajectory.state_dict() for trajectory in whole(rollouts.trajectories)],
            "metrics": rollouts.metrics,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], keep: Callable[[Rollouts], Rollouts]) -> "OpenGroup":
        """Rebuild a group from its `state_dict`; `keep` as `RolloutRunner.keep`."""
        samples = [Trajectory.from_state(sample) for sample in state["trajectories"]]
        rollouts = keep(Rollouts(samples, dict(state["metrics"])))
        return cls(state["number"], state["last_step"], PromptPosition(*state["position"]), rollouts=rollouts)


_ORDERS: Mapping[str, Callable[[OpenGroup], tuple[int, ...]]] = {
    "in_order": lambda group: (group.number,),
    "ready_first": lambda group: (not group.is_finished, group.number),
    "weight_fifo": lambda group: (group.last_step, not group.is_finished, group.number),
    "freshest_first": lambda group: (not group.is_finished, -group.number),
}
"""How groups are preferred, by `overlap.order`: the smallest value first."""


def groups_of_step(groups: Sequence[OpenGroup], count: int, step: int, order: str) -> list[OpenGroup]:
    """Choose the groups that a step takes; they may still be running.

    Each later step takes `count` groups too. So of the groups whose last step is d or earlier, all but
    `count * (d - step)` have to be taken now (earliest deadline first). The rest follows the order.

    Args:
        groups: all open groups.
        count: groups of a step.
        step: number of the step.
        order: as `overlap.order`.
    """
    ranked = sorted(groups, key=_ORDERS[order])
    chosen: dict[OpenGroup, None] = {}
    for last_step in sorted({group.last_step for group in groups}):
        due = [group for group in ranked if group.last_step <= last_step]
        later = [group for group in due if group not in chosen]
        num_places = count * (last_step - step)
        chosen |= dict.fromkeys(later[: max(0, len(later) - num_places)])
    others = [group for group in ranked if group not in chosen]
    return [*chosen, *others][:count]


@dataclass
class AheadRollouts:
    """Samples up to `max_age_steps` steps ahead of training; an `algorithms.rollout.source.RolloutSource`.

    Attributes:
        fresh: draws prompts and plays groups.
        groups_per_step: groups that each call of `next_groups` gives, B.
        overlap: the section `overlap`.
        num_steps: last step of the run; nothing is sampled for later ones.
        metrics: of the last groups; see `next_groups`.
    """

    fresh: FreshRollouts
    groups_per_step: int
    overlap: OverlapConfig
    num_steps: int
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    _open: list[OpenGroup] = field(default_factory=list, init=False)
    _drawn: deque[_Prompt] = field(default_factory=deque, init=False)
    """Prompts that were drawn and not started."""
    _num_batches: int = field(default=0, init=False)
    _num_started: int = field(default=0, init=False)
    _failures: "_Failures" = field(init=False)
    _slots: asyncio.Semaphore | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        limit = self.overlap.max_inflight_prompts
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._failures = _Failures(self.overlap.max_generation_failures)
        self.fresh.prompts.attach("ahead", self)

    @property
    def max_staleness(self) -> int:
        """See `RolloutSource.max_staleness`."""
        return self.overlap.max_age_steps

    def next_groups(self, step: int) -> Iterator[Group]:
        """See `RolloutSource.next_groups`.

        Sets `metrics` to those of the environments and `buffer_size`, the groups that were started for later steps.
        """
        age, count = self.overlap.max_age_steps, self.groups_per_step
        steps_left = self.num_steps - step
        self._start(step, (min(age, steps_left) + 1) * count)
        taken = self._take(step)
        self._start(step, min(age, steps_left) * count)
        rollouts = [group.finished(self.fresh.runner.group_limit_s) for group in taken]
        self.metrics = self.fresh.runner.post_process(rollouts) | {"buffer_size": float(len(self._open))}
        for group, samples in zip(taken, rollouts, strict=True):
            yield Group((0, group.number), samples.trajectories, group.position)

    def _start(self, step: int, most: int) -> None:
        """Start groups until `most` are open, or the data ends."""
        limit = self.overlap.max_buffered_groups
        most = most if limit is None else min(most, limit)
        while len(self._open) < most:
            prompt = self._next_prompt()
            if prompt is None:
                return
            task = self.fresh.runner.start(
                self._play(prompt),
                f"the sampling of prompt {prompt.row} of batch {prompt.key.step}",
                through_updates=self.overlap.in_flight_weight_updates,
            )
            last_step = step + self.overlap.max_age_steps
            self._open.append(OpenGroup(self._num_started, last_step, prompt.position, task))
            self._num_started += 1

    def _next_prompt(self) -> _Prompt | None:
        if not self._drawn:
            try:
                batch = self.fresh.prompts.next_batch()
            except DataExhausted:
                return None
            self._num_batches += 1
            # Named by the number of the batch, which is the step that trains on it where nothing is left out.
            key = RolloutKey(self.fresh.run_seed, "train", self._num_batches)
            self._drawn.extend(_Prompt(batch, row, key) for row in range(batch.rows.size))
        return self._drawn.popleft()

    async def _play(self, prompt: _Prompt) -> Rollouts:
        """Sample one group, again after a failure as long as `max_generation_failures` allows it."""
        while True:
            async with self._slots or _NO_LIMIT:
                try:
                    group = await self.fresh.play(prompt.batch.rows, prompt.row, prompt.key)
                except (DeadlineExceededError, GenerationError) as failure:
                    self._failures.note(failure)
                else:
                    self._failures.in_a_row = 0
                    return group

    def _take(self, step: int) -> list[OpenGroup]:
        """Wait for the groups of a step and remove them from the open ones.

        Raises:
            DataExhausted: no group is open, and the data has ended.
            DeadlineExceededError: no group was finished within the deadline of a group.
        """
        if not self._open:
            self.fresh.prompts.next_batch()  # raises DataExhausted, with the reason
        while True:
            taken = groups_of_step(self._open, self.groups_per_step, step, self.overlap.order)
            running = [group.task for group in self._open if group.task is not None and not group.is_finished]
            if all(group.is_finished for group in taken):
                break
            if not wait_for_any(running, self.fresh.runner.group_limit_s):
                raise DeadlineExceededError(
                    f"None of {len(running)} groups of answers was finished within "
                    f"{self.fresh.runner.group_limit_s:g} s (cluster.timeouts.rollout_s)."
                )
        for group in taken:
            self._open.remove(group)
        return sorted(taken, key=lambda group: group.number)

    def state_dict(self) -> dict[str, Any]:
        """Return the finished groups, and the number of batches drawn.

        Without `in_flight_weight_updates` it waits for all groups: a resumed run has no older weights to sample them
        from, and repeats the run bit for bit. With it, groups that are running are left out; the stream hands their
        prompts out again.
        """
        if not self.overlap.in_flight_weight_updates:
            self.fresh.runner.wait_for_groups()
        return {
            "groups": [group.state_dict() for group in self._open if group.is_finished and not group.has_failed],
            "num_batches": self._num_batches,
            "num_started": self._num_started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the groups of a checkpoint; prompts that were drawn and not started are handed out again."""
        self._open = [OpenGroup.from_state(group, self.fresh.runner.keep) for group in state["groups"]]
        self._drawn.clear()
        self._num_batches, self._num_started = state["num_batches"], state["num_started"]
        self.fresh.prompts.claim(group.position for group in self._open)


@dataclass
class _Failures:
    """Counts groups in a row that failed."""

    most: int
    in_a_row: int = 0

    def note(self, failure: Exception) -> None:
        """Count a failure; raise it if there were too many."""
        self.in_a_row += 1
        if self.in_a_row > self.most:
            raise failure
        logger.warning("A group failed and is sampled again (%d of %d in a row): %s", self.in_a_row, self.most, failure)


def with_overlap(fresh: FreshRollouts, groups_per_step: int, algorithm: RolloutTrainingConfig) -> RolloutSource:
    """Return the source of the section `overlap`: the given one, or one that samples ahead."""
    if algorithm.overlap.mode != "ahead":
        return fresh
    return AheadRollouts(fresh, groups_per_step, algorithm.overlap, algorithm.max_num_steps)
