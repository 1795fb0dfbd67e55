"""Sample groups ahead of the step that trains on them.

    step s:  start groups ─► take the batch of s ─► start groups ─► training of s, while engines sample on
             room for (age + 1) x B                 room for age x B

A prompt is started only if a step can still train on its group within `max_age_steps`, so no group is dropped. The
number of open groups is limited accordingly: each step takes B groups, and a group that was started in step s has to be
taken by step s + age. Invariants: each started group is given to exactly one step, and not later than its last step.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.algorithms.rollout.source import FreshRollouts, Group, RolloutSource, drawn_prompts
from nemo_rl.config import OverlapConfig, RolloutTrainingConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptBatch, PromptPosition
from nemo_rl.experience.event_loop import BackgroundTask, wait_for_any
from nemo_rl.experience.progress import GroupProgress, StoredSamples, num_stored_tokens
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.runners.stored import whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError

logger = logging.getLogger(__name__)


@dataclass
class GroupFailures:
    """Counter of failed groups. It decides whether a group is sampled again, is skipped, or ends the run."""

    overlap: OverlapConfig
    num_skipped: int = 0
    """Number of prompts that were skipped."""
    _in_a_row: int = field(default=0, init=False)

    def note_success(self) -> None:
        """Reset the number of consecutive failures after a finished group."""
        self._in_a_row = 0

    def pause_before_next(self, attempt: int, failure: Exception) -> float | None:
        """Return the seconds to wait before a failed group is sampled again, or None to skip its prompt.

        Args:
            attempt: Number of the attempt that failed, from 1.
            failure: Error of the attempt. It is raised if the run has to end.
        """
        keys = self.overlap.group_failures
        most = keys.max_attempts_per_prompt
        if most is None:
            self._in_a_row += 1
            if self._in_a_row > self.overlap.max_generation_failures:
                raise failure
            count = f"{self._in_a_row} of {self.overlap.max_generation_failures} in a row"
        elif attempt < most:
            count = f"attempt {attempt} of {most}"
        else:
            self._skip(failure)
            return None
        pause_s = min(keys.backoff_base_s * 2 ** (attempt - 1), keys.max_backoff_s)
        logger.warning("A group failed and is sampled again after %g s (%s): %s", pause_s, count, failure)
        return pause_s

    def _skip(self, failure: Exception) -> None:
        keys = self.overlap.group_failures
        if self.num_skipped >= keys.max_skipped_prompts:
            if keys.max_skipped_prompts:
                failure.add_note(
                    f"{self.num_skipped} prompts were skipped already, as many as "
                    "overlap.group_failures.max_skipped_prompts allows."
                )
            raise failure
        self.num_skipped += 1
        logger.warning(
            "A prompt is skipped after %d failed attempts (%d of at most %d in the run): %s",
            keys.max_attempts_per_prompt,
            self.num_skipped,
            keys.max_skipped_prompts,
            failure,
        )

    def check_step(self, num_groups: int, num_skipped: int) -> None:
        """Check that not too many groups of a step were skipped.

        Raises:
            GenerationError: Too many groups were skipped.
        """
        least = self.overlap.group_failures.min_step_fraction
        if num_groups - num_skipped < least * num_groups:
            raise GenerationError(
                f"{num_skipped} of the {num_groups} prompts of a step were skipped, because their answers could not be "
                f"sampled; overlap.group_failures.min_step_fraction={least:g} asks for more. The warnings above say "
                "why. Fix the cause and start the same command again."
            )


@dataclass(frozen=True)
class DrawnPrompt:
    """A drawn prompt, with its row in the drawn batch and the key of the batch's collection."""

    batch: PromptBatch
    row: int
    key: RolloutKey

    @property
    def position(self) -> PromptPosition:
        """Position of the prompt in the training data."""
        return self.batch.positions[self.row]


@dataclass(frozen=True)
class Origin:
    """Place where a prompt was first drawn. The random numbers of its group depend on it, also after a resume."""

    batch: int
    """Number of the batch in which the prompt was first drawn, from 1."""
    row: int
    """Row of the prompt in that batch."""

    def key(self, run_seed: int, row: int) -> RolloutKey:
        """Return the key of a collection in which the prompt at `row` gets the random numbers of this origin."""
        return RolloutKey(run_seed, "train", self.batch, first_group=self.row - row)


@dataclass(eq=False)
class OpenGroup:
    """A group that was started and has not been given to a step yet."""

    number: int
    """Number of groups that were started before this one."""
    last_step: int
    """Last step that may train on the group."""
    position: PromptPosition
    """Position of the group's prompt in the data."""
    task: BackgroundTask[Rollouts] | None = None
    """Background task that samples the group. It is None for a finished group, and for an unfinished one that is not
    started yet, if the group comes from a checkpoint."""
    origin: Origin = Origin(0, 0)
    """Origin of the group's random numbers."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    """Sampling state of the group's samples."""
    num_lost_tokens: int = 0
    """Number of sampled tokens that are not stored in the checkpoint and are sampled again after a resume."""
    was_skipped: bool = False
    """Whether the group could not be sampled. All of its samples then count as failed."""

    @property
    def is_finished(self) -> bool:
        """True if the samples are available without waiting."""
        return self.task is None or self.task.is_done

    @property
    def has_to_start(self) -> bool:
        """True if the group comes from a checkpoint and is unfinished."""
        return self.task is None and self.progress.rollouts is None

    @property
    def num_continued_tokens(self) -> int:
        """Return the number of stored tokens of unfinished samples."""
        return sum(num_stored_tokens(state) for state in self.progress.stored if state is not None)

    def restart(self) -> None:
        """Discard the stored state, so that the samples start from the prompt."""
        self.num_lost_tokens += self.num_continued_tokens
        self.progress.forget()

    def finished(self, timeout_s: float) -> Rollouts:
        """Wait for the samples and return them. Errors are those of `BackgroundTask.result`."""
        if self.task is not None:
            return self.task.result(timeout_s)
        assert self.progress.rollouts is not None
        return self.progress.rollouts

    def state_dict(self, unfinished: StoredSamples | None) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint.

        Args:
            unfinished: The stored samples of an unfinished group, or None for a finished group.
        """
        state = {"number": self.number, "last_step": self.last_step, "position": list(self.position)}
        if unfinished is not None:
            origin = {"origin": [self.origin.batch, self.origin.row]}
            return state | origin | {"samples": unfinished.states, "num_lost_tokens": unfinished.num_lost_tokens}
        assert self.progress.rollouts is not None
        trajectories = [trajectory.state_dict() for trajectory in whole(self.progress.rollouts.trajectories)]
        finished = {"trajectories": trajectories, "was_skipped": self.was_skipped}
        return state | finished | {"metrics": self.progress.rollouts.metrics}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], keep: Callable[[Rollouts], Rollouts]) -> "OpenGroup":
        """Rebuild a group from its `state_dict`. An unfinished group is not started.

        Args:
            keep: Function that does what `RolloutRunner.keep` does.
        """
        group = cls(state["number"], state["last_step"], PromptPosition(*state["position"]))
        if "trajectories" in state:
            samples = [Trajectory.from_state(sample) for sample in state["trajectories"]]
            group.progress.rollouts = keep(Rollouts(samples, dict(state["metrics"])))
            group.was_skipped = state.get("was_skipped", False)
        else:
            group.origin, group.progress.stored = Origin(*state["origin"]), state["samples"]
            group.num_lost_tokens = state["num_lost_tokens"]
        return group


_ORDERS: Mapping[str, Callable[[OpenGroup], tuple[int, ...]]] = {
    "in_order": lambda group: (group.number,),
    "ready_first": lambda group: (not group.is_finished, group.number),
    "weight_fifo": lambda group: (group.last_step, not group.is_finished, group.number),
    "freshest_first": lambda group: (not group.is_finished, -group.number),
}
"""Functions by the value of `overlap.order`. Each returns the sort key of a group; the smallest key is preferred."""


def groups_of_step(groups: Sequence[OpenGroup], count: int, step: int, order: str) -> list[OpenGroup]:
    """Choose the groups that a step takes from all open groups. Chosen groups may still be running.

    Later steps take `count` groups each. Up to step d they can take `count * (d - step)` of the groups whose last step
    is at most d, so this step has to take the rest of these groups. `order` (`overlap.order`) chooses its other groups.
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


_NO_LIMIT = contextlib.nullcontext()


@dataclass
class AheadRollouts:
    """Source that samples up to `max_age_steps` steps ahead of training (`source.RolloutSource`)."""

    fresh: FreshRollouts
    """Source that draws prompts and samples groups."""
    groups_per_step: int
    """Number B of groups that each call of `next_groups` returns."""
    overlap: OverlapConfig
    num_steps: int
    """Last step of the run. No groups are sampled for later steps."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the last call of `next_groups`."""
    _open: list[OpenGroup] = field(default_factory=list, init=False)
    _drawn: deque[DrawnPrompt] = field(default_factory=deque, init=False)
    """Prompts that were drawn but not started."""
    _num_batches: int = field(default=0, init=False)
    _num_started: int = field(default=0, init=False)
    _resumed: Counter[str] = field(default_factory=Counter, init=False)
    """Metrics of unfinished groups of the checkpoint, which the first step reports."""
    _failures: GroupFailures = field(init=False)
    _slots: asyncio.Semaphore | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        limit = self.overlap.max_inflight_prompts
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._failures = GroupFailures(self.overlap)
        self.fresh.prompts.attach("ahead", self)

    @property
    def max_staleness(self) -> int:
        """Return `RolloutSource.max_staleness`, the configured maximum age in steps."""
        return self.overlap.max_age_steps

    def next_groups(self, step: int) -> Iterator[Group]:
        """Return the groups of a step, as `RolloutSource.next_groups` does, and start groups for later steps.

        Sets `metrics` to the metrics of the environments and the following:

        - `buffer_size`: number of groups that were started for later steps.
        - `num_skipped_prompts`: number of groups of the step whose samples failed (`GroupFailures`).
        - `num_continued_tokens`, in the first step of a resumed run: stored tokens of groups that continue.
        - `num_restarted_tokens`, in the same step: number of sampled tokens that were lost and are sampled again.
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
        """Start groups until `most` groups are open or the data ends."""
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
        """Sample a group in the background, from its prompt or from its stored state."""
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
            # # The key has the number of the batch instead of the step, because the step that will train on it is not
            # known yet.
            key = RolloutKey(self.fresh.run_seed, "train", self._num_batches)
            self._drawn.extend(DrawnPrompt(batch, row, key) for row in range(batch.rows.size))
        return self._drawn.popleft()

    async def _play(self, group: OpenGroup, prompt: DrawnPrompt) -> Rollouts:
        """Sample one group, again after failures. If `GroupFailures` skips the prompt, return failed samples."""
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
        """Wait for the groups of a step and remove them from the open groups."""
        if not self._open:
            self.fresh.prompts.next_batch()  # raises DataExhausted, because no prompt is left
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
        """Return the open groups and the numbers of batches and groups so far.

        Without `in_flight_weight_updates`, first wait for all groups: a resumed run must give the same results bit for
        bit, and it does not have the older weights that sample these groups. With `in_flight_weight_updates`, running
        groups continue, and their state is stored as `partial_responses` defines.
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
        """Restore the open groups of a checkpoint. Prompts that were drawn but not started are drawn again."""
        self._open = [OpenGroup.from_state(group, self.fresh.runner.keep) for group in state["groups"]]
        self._drawn.clear()
        self._num_batches, self._num_started = state["num_batches"], state["num_started"]
        self._failures.num_skipped = state.get("num_skipped", 0)
        self.fresh.prompts.claim(group.position for group in self._open)

    def _start_unfinished(self) -> None:
        """Start the unfinished groups of a checkpoint. The engines must have weights."""
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


def with_overlap(fresh: FreshRollouts, algorithm: RolloutTrainingConfig) -> RolloutSource:
    """Return `fresh`, or the source that samples ahead with it if the section `overlap` is enabled."""
    if algorithm.overlap.mode != "ahead":
        return fresh
    return AheadRollouts(fresh, drawn_prompts(algorithm), algorithm.overlap, algorithm.max_num_steps)
