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
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.algorithms.rollout.group_failures import GroupFailures
from nemo_rl.algorithms.rollout.open_groups import DrawnPrompt, OpenGroup, Origin, groups_of_step
from nemo_rl.algorithms.rollout.source import FreshRollouts, Group, RolloutSource
from nemo_rl.config import OverlapConfig, RolloutTrainingConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted
from nemo_rl.experience.event_loop import wait_for_any
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError

logger = logging.getLogger(__name__)

_NO_LIMIT = contextlib.nullcontext()


@dataclass
class AheadRollouts:
    """Samples up to `max_age_steps` steps ahead of training; an `algorithms.rollout.source.RolloutSource`."""

    fresh: FreshRollouts
    """Draws prompts and plays groups."""
    groups_per_step: int
    """Groups that each call of `next_groups` gives, B."""
    overlap: OverlapConfig
    num_steps: int
    """Last step of the run; nothing is sampled for later ones."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the last groups; see `next_groups`."""
    _open: list[OpenGroup] = field(default_factory=list, init=False)
    _drawn: deque[DrawnPrompt] = field(default_factory=deque, init=False)
    """Prompts that were drawn and not started."""
    _num_batches: int = field(default=0, init=False)
    _num_started: int = field(default=0, init=False)
    _resumed: Counter[str] = field(default_factory=Counter, init=False)
    """Tokens of the unfinished groups of a checkpoint, before the first step."""
    _failures: GroupFailures = field(init=False)
    _slots: asyncio.Semaphore | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        limit = self.overlap.max_inflight_prompts
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._failures = GroupFailures(self.overlap)
        self.fresh.prompts.attach("ahead", self)

    @property
    def max_staleness(self) -> int:
        """See `RolloutSource.max_staleness`."""
        return self.overlap.max_age_steps

    def next_groups(self, step: int) -> Iterator[Group]:
        """See `RolloutSource.next_groups`.

        Sets `metrics` to those of the environments; `buffer_size`, the groups that were started for later steps;
        `num_skipped_prompts`, the groups of the step whose samples failed (`GroupFailures`); and for the first step
        after a resume the sampled tokens of unfinished groups: `num_continued_tokens` become part of these groups,
        `num_restarted_tokens` are thrown away, and their samples start again.
        """
        self._start_unfinished()
        age, count = self.overlap.max_age_steps, self.groups_per_step
        steps_left = self.num_steps - step
        self._start(step, (min(age, steps_left) + 1) * count)
        taken = self._take(step)
        self._start(step, min(age, steps_left) * count)
        rollouts = [group.finished(self.fresh.runner.group_limit_s) for group in taken]
        tokens = {name: float(self._resumed.pop(name, 0)) for name in ("num_continued_tokens", "num_restarted_tokens")}
        buffer_size = {"buffer_size": float(len(self._open))}
        num_skipped = sum(group.was_skipped for group in taken)
        self._failures.check_step(len(taken), num_skipped)
        skipped = {"num_skipped_prompts": float(num_skipped)}
        self.metrics = self.fresh.runner.post_process(rollouts) | buffer_size | tokens | skipped
        for group, samples in zip(taken, rollouts, strict=True):
            yield Group((0, group.number), samples.trajectories, group.position)

    def _start(self, step: int, most: int) -> None:
        """Start groups until `most` are open, or the data ends."""
        limit = self.overlap.max_buffered_groups
        most = most if limit is None else min(most, limit)
        with self.fresh.runner.starting_together():
            while len(self._open) < most:
                prompt = self._next_prompt()
                if prompt is None:
                    return
                last_step = step + self.overlap.max_age_steps
                origin = Origin(prompt.key.step, prompt.row)
                group = OpenGroup(self._num_started, last_step, prompt.position, origin=origin)
                self._sample(group, prompt)
                self._open.append(group)
                self._num_started += 1

    def _sample(self, group: OpenGroup, prompt: DrawnPrompt) -> None:
        """Sample a group in the background, from where it is."""
        group.task = self.fresh.runner.start(
            self._play(group, prompt),
            f"the sampling of prompt {group.origin.row} of batch {group.origin.batch}",
            through_updates=self.overlap.in_flight_weight_updates,
        )

    def _next_prompt(self) -> DrawnPrompt | None:
        if not self._drawn:
            try:
                batch = self.fresh.prompts.next_batch()
            except DataExhausted:
                return None
            self._num_batches += 1
            # The key has the number of the batch as its step, because the step that will train on it is not known yet.
            key = RolloutKey(self.fresh.run_seed, "train", self._num_batches)
            self._drawn.extend(DrawnPrompt(batch, row, key) for row in range(batch.rows.size))
        return self._drawn.popleft()

    async def _play(self, group: OpenGroup, prompt: DrawnPrompt) -> Rollouts:
        """Sample one group, again after failures, or give its samples as failed ones; see `GroupFailures`."""
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._slots or _NO_LIMIT:
                    rollouts = await self.fresh.play(prompt.batch.rows, prompt.row, prompt.key, group.progress)
            except (DeadlineExceededError, GenerationError) as failure:
                group.progress.forget()
                pause_s = self._failures.pause_before_next(attempt, failure)
                if pause_s is None:
                    return self._skip(group, prompt, failure)
                await asyncio.sleep(pause_s)
            else:
                self._failures.note_success()
                return rollouts

    def _skip(self, group: OpenGroup, prompt: DrawnPrompt, failure: Exception) -> Rollouts:
        group.was_skipped = True
        reason = f"its group could not be sampled: {failure}"
        group.progress.rollouts = self.fresh.failed(prompt.batch.rows, prompt.row, reason)
        return group.progress.rollouts

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
        """Return the groups, and the number of batches drawn.

        Without `in_flight_weight_updates` it waits for all groups: a resumed run has no older weights to sample them
        from, and repeats the run bit for bit. With it, groups that are running are stored as far as
        `partial_responses` asks for, and sampled on meanwhile.
        """
        if not self.overlap.in_flight_weight_updates:
            self.fresh.runner.wait_for_groups()
        continues = self.overlap.partial_responses == "continue"
        stored = self.fresh.runner.stored_samples([group.progress for group in self._open])
        return {
            "groups": [
                group.state_dict(samples if samples is None or continues else samples.without_states())
                for group, samples in zip(self._open, stored, strict=True)
            ],
            "num_batches": self._num_batches,
            "num_started": self._num_started,
            "num_skipped": self._failures.num_skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the groups of a checkpoint; prompts that were drawn and not started are handed out again."""
        self._open = [OpenGroup.from_state(group, self.fresh.runner.keep) for group in state["groups"]]
        self._drawn.clear()
        self._num_batches, self._num_started = state["num_batches"], state["num_started"]
        self._failures.num_skipped = state.get("num_skipped", 0)
        self.fresh.prompts.claim(group.position for group in self._open)

    def _start_unfinished(self) -> None:
        """Start the unfinished groups of a checkpoint, when the engines have weights."""
        groups = [group for group in self._open if group.has_to_start]
        if not groups:
            return
        batch = self.fresh.prompts.prepare([group.position for group in groups])
        for row, group in enumerate(groups):
            if self.overlap.partial_responses == "restart":
                group.restart()
            self._resumed["num_continued_tokens"] += group.num_continued_tokens
            self._resumed["num_restarted_tokens"] += group.num_lost_tokens
            self._sample(group, DrawnPrompt(batch, row, group.origin.key(self.fresh.run_seed, row)))
        logger.info(
            "%d unfinished groups of the checkpoint continue: %d of their tokens are kept, and %d are sampled again.",
            len(groups),
            self._resumed["num_continued_tokens"],
            self._resumed["num_restarted_tokens"],
        )


def with_overlap(fresh: FreshRollouts, groups_per_step: int, algorithm: RolloutTrainingConfig) -> RolloutSource:
    """Return the source of the section `overlap`: the given one, or one that samples ahead."""
    if algorithm.overlap.mode != "ahead":
        return fresh
    return AheadRollouts(fresh, groups_per_step, algorithm.overlap, algorithm.max_num_steps)
