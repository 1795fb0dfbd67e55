"""Groups that were started and not trained on: which of them a step takes, and how a checkpoint stores them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.streams.prompt_stream import PromptBatch, PromptPosition
from nemo_rl.experience.event_loop import BackgroundTask
from nemo_rl.experience.progress import GroupProgress, StoredSamples, num_stored_tokens
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.runners.stored import whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory


@dataclass(frozen=True)
class DrawnPrompt:
    """One drawn prompt: its batch, its row there, and the name of the batch's collection."""

    batch: PromptBatch
    row: int
    key: RolloutKey

    @property
    def position(self) -> PromptPosition:
        """Its position in the stream."""
        return self.batch.positions[self.row]


@dataclass(frozen=True)
class Origin:
    """Origin of the random numbers of a group; the same after a resume."""

    batch: int
    """Number of the batch in which its prompt was drawn first, from 1."""
    row: int
    """Its row there."""

    def key(self, run_seed: int, row: int) -> RolloutKey:
        """Return the name of a collection in which the prompt is at `row` and gets the same random numbers."""
        return RolloutKey(run_seed, "train", self.batch, first_group=self.row - row)


@dataclass(eq=False)
class OpenGroup:
    """A group that was started and not given yet."""

    number: int
    """Groups that were started before it."""
    last_step: int
    """The last step that may train on it."""
    position: PromptPosition
    """Its prompt in the data."""
    task: BackgroundTask[Rollouts] | None = None
    """Samples it in the background; None for a finished group of a checkpoint, and for an unfinished one before the
    first step."""
    origin: Origin = Origin(0, 0)
    """Names its random numbers."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    """State of its samples."""
    num_lost_tokens: int = 0
    """Tokens of its samples that its checkpoint has not stored."""
    was_skipped: bool = False
    """Its samples failed, because it could not be sampled."""

    @property
    def is_finished(self) -> bool:
        """True if no wait is needed to give it."""
        return self.task is None or self.task.is_done

    @property
    def has_to_start(self) -> bool:
        """True if it is unfinished and comes from a checkpoint."""
        return self.task is None and self.progress.rollouts is None

    @property
    def num_continued_tokens(self) -> int:
        """The number of tokens that its checkpoint has stored of unfinished samples."""
        return sum(num_stored_tokens(state) for state in self.progress.stored if state is not None)

    def restart(self) -> None:
        """Let its samples start from the prompt, whatever its checkpoint has stored."""
        self.num_lost_tokens += self.num_continued_tokens
        self.progress.forget()

    def finished(self, timeout_s: float) -> Rollouts:
        """Wait for the samples and return them; raises what `BackgroundTask.result` raises."""
        if self.task is not None:
            return self.task.result(timeout_s)
        assert self.progress.rollouts is not None
        return self.progress.rollouts

    def state_dict(self, unfinished: StoredSamples | None) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint.

        Args:
            unfinished: its samples; None if it is finished.
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
        """Rebuild a group from its `state_dict`; one that is not finished has to be started.

        Args:
            state: the state.
            keep: as `RolloutRunner.keep`.
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
