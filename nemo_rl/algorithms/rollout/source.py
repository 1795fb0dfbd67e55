"""Sources of the trajectories that a training step learns from.

A source draws prompts and gives groups of graded trajectories, each when it is finished. Variants wrap another source
instead of adding branches to the loop: `DynamicSampling` wraps any source. `batches.RolloutBatches` tells the prompt
stream which prompts were trained on. A source that samples ahead of training stores its groups with the stream
(`Prompts.attach`). Invariant: the groups of a step do not depend on the order in which they finish.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from nemo_rl.config import RewardedTrainingConfig, RolloutSourceConfig, RolloutTrainingConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptBatch, PromptPosition, Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.event_loop import BackgroundTask
from nemo_rl.experience.metrics import mean_metrics
from nemo_rl.experience.progress import GroupProgress
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.runners.stored import whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import NothingToLearnError
from nemo_rl.utils.named_parts import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """The finished samples of one prompt."""

    order: tuple[int, int]
    """Position among the groups of a step: the sampling round and the prompt's index in it. It does not depend on
    timing."""
    trajectories: Sequence[Trajectory]
    """Trajectories ordered by sample."""
    prompt: PromptPosition | None = None
    """Position of the prompt in the stream. None if the prompt does not come from the stream."""
    trains: bool = True
    """Whether the batch contains the group. If it is False, the prompt is still acknowledged with the batch. A prompt
    whose group a source never returns is not acknowledged, so a resumed run samples it again."""


def numbered(groups: Sequence[Group]) -> list[Trajectory]:
    """Set the `group_index` of the trajectories of each group, and return all trajectories in order."""
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.group_index = index
    return [trajectory for group in groups for trajectory in group.trajectories]


@dataclass(frozen=True)
class SampledGroups:
    """Groups that were sampled together, in a form that a source can save in its state."""

    groups: list[Group]
    """Groups ordered by prompt."""
    metrics: dict[str, float]
    """Metrics reported by environments."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        groups = [
            {
                "order": list(group.order),
                "prompt": None if group.prompt is None else list(group.prompt),
                "trajectories": [trajectory.state_dict() for trajectory in whole(group.trajectories)],
            }
            for group in self.groups
        ]
        return {"groups": groups, "metrics": self.metrics}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompts: Prompts) -> Self:
        """Rebuild groups from their `state_dict`, and mark their prompts as used in the stream."""
        groups = []
        for each in state["groups"]:
            (round_index, index), prompt = each["order"], each["prompt"]
            position = None if prompt is None else PromptPosition(*prompt)
            samples = [Trajectory.from_state(sample) for sample in each["trajectories"]]
            groups.append(Group((round_index, index), samples, position))
        prompts.claim(group.prompt for group in groups if group.prompt is not None)
        return cls(groups, dict(state["metrics"]))


class RolloutSource(Protocol):
    """Interface that returns the groups of each step."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last sampling, logged under `train/`."""

    @property
    def max_staleness(self) -> int:
        """Largest number of policy updates between the weights that sampled a group and the step that trains on it.

        With 0 every token comes from the policy's current weights. Tokens of older weights are marked in the batch
        (`StepBatch.num_stale_B`).
        """

    def next_groups(self, step: int) -> Iterator[Group]:
        """Yield groups for training step `step` (from 1), each when it is finished.

        A second call in the same step gives further groups. Groups come in any order (`Group.order`).

        Raises:
            DataExhausted: There are not enough prompts for the step.
        """


@dataclass
class StartedGroups:
    """Groups that are sampled in the background."""

    runner: RolloutRunner
    """Runner that samples the groups."""
    batch: PromptBatch
    key: RolloutKey
    """Key of the collection."""
    tasks: list[BackgroundTask[Rollouts]]
    """The groups' tasks, one per prompt, in the order of the batch."""

    def finish(self) -> SampledGroups:
        """Wait for all groups.

        Raises:
            DeadlineExceededError: A group takes too long.
            Exception: A group failed. The other groups are cancelled.
        """
        try:
            rollouts = [task.result(self.runner.group_limit_s) for task in self.tasks]
        finally:
            for task in self.tasks:
                task.cancel()  # after a failure; finished tasks stay as they are
        metrics = self.runner.post_process(rollouts)
        groups = [
            Group((self.key.round, row), each.trajectories, self.batch.positions[row])
            for row, each in enumerate(rollouts)
        ]
        return SampledGroups(groups, metrics)


SOURCES: Registry[RolloutSource] = Registry(
    "rollout source",
    RolloutSource,
    {"fresh": f"{__name__}.FreshRollouts", "dynamic_sampling": f"{__name__}.DynamicSampling"},
    attributes=("metrics", "max_staleness"),
)
"""Sources by the name in `rollout_source.name`. A user's source is constructed with the source that it wraps."""


def drawn_prompts(algorithm: RolloutTrainingConfig) -> int:
    """Return the number of prompts that are drawn at once: those of a step or, with dynamic sampling, of a round."""
    if isinstance(algorithm, RewardedTrainingConfig) and algorithm.use_dynamic_sampling:
        return int(algorithm.num_prompts_per_step * algorithm.batch_multiplier)
    return algorithm.num_prompts_per_step


def check_source(config: RolloutSourceConfig, key: str) -> None:
    """Check the user-supplied source if the section names one.

    Args:
        key: dotted path of the section.

    Raises:
        ConfigError: the class cannot be used, or its arguments do not fit.
    """
    if SOURCES.is_own(config.name):
        SOURCES.check_arguments(config.name, key, config.kwargs, num_given=1)


def wrap_source(inner: RolloutSource, config: RolloutSourceConfig, key: str) -> RolloutSource:
    """Return the source wrapped in the user's class. Without such a class, return the source itself."""
    return SOURCES.make(config.name, key, config.kwargs, inner) if SOURCES.is_own(config.name) else inner


@dataclass
class FreshRollouts:
    """Source that samples the next batch of prompts with the current weights.

    Nothing is sampled ahead. If a run is resumed, an untrained step is sampled again from the weights of the
    checkpoint. A source that wraps this one can use `start` to sample in the background.
    """

    prompts: Prompts
    runner: RolloutRunner
    """Runner that samples the groups."""
    sampling: SamplingParams
    """Sampling parameters."""
    num_generations: int
    """Number of samples per prompt."""
    run_seed: int
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the environments for the last groups."""
    _rounds: Counter[int] = field(default_factory=Counter, init=False)
    """Number of collections so far in each step."""

    max_staleness = 0

    def next_groups(self, step: int) -> Iterator[Group]:
        """Sample the next batch of prompts, and yield its groups as `RolloutSource.next_groups` does."""
        batch, key = self._next_batch(step)
        collection = self.runner.stream(batch.rows, self.num_generations, self.sampling, key)
        for samples in collection:
            row = samples[0].group_index
            yield Group((key.round, row), samples, batch.positions[row])
        self.metrics = collection.metrics

    def start(self, step: int) -> StartedGroups:
        """Draw the next batch of prompts for a step, and start to sample its groups in the background.

        Raises:
            DataExhausted: there is no further batch.
        """
        batch, key = self._next_batch(step)
        with self.runner.starting_together():
            tasks = [
                self.runner.start_group(batch.rows, row, self.num_generations, self.sampling, key)
                for row in range(batch.rows.size)
            ]
        return StartedGroups(self.runner, batch, key, tasks)

    async def play(
        self, prompts: BatchedDataDict[Any], row: int, key: RolloutKey, progress: GroupProgress | None = None
    ) -> Rollouts:
        """Sample the group of one prompt. Arguments and errors are those of `RolloutRunner.play_group`."""
        return await self.runner.play_group(prompts, row, self.num_generations, self.sampling, key, progress)

    def failed(self, prompts: BatchedDataDict[Any], row: int, reason: str) -> Rollouts:
        """Return the group of a prompt that cannot be sampled, with failed samples (`RolloutRunner.failed_group`)."""
        return self.runner.failed_group(prompts, row, self.num_generations, reason)

    def _next_batch(self, step: int) -> tuple[PromptBatch, RolloutKey]:
        batch = self.prompts.next_batch()
        key = RolloutKey(self.run_seed, "train", step, self._rounds[step])
        self._rounds[step] += 1
        return batch, key


class DynamicSampling:
    """DAPO's dynamic sampling (Yu et al. 2025, section 3.2): train only on groups whose rewards differ.

    Groups are sampled until `num_groups` groups have at least two different rewards. Rewards are compared after
    penalties and scaling, because penalties may make equal rewards different, and scaling may clip different rewards to
    one value. All other groups are returned with `trains=False`.

    Args:
        inner: Source to collect from.
        num_groups: Number of groups per step.
        max_rounds: Largest number of collections per step.
        scale: Function that scales rewards `[G]` before advantages are computed. If None, rewards are not scaled.
    """

    def __init__(
        self,
        inner: RolloutSource,
        num_groups: int,
        max_rounds: int,
        scale: Callable[[Tensor], Tensor] | None = None,
    ):
        self._inner = inner
        self._num_groups = num_groups
        self._max_rounds = max_rounds
        self._scale = scale
        self.metrics: dict[str, float] = {}

    @property
    def max_staleness(self) -> int:
        """Return `max_staleness` of the inner source."""
        return self._inner.max_staleness

    def next_groups(self, step: int) -> Iterator[Group]:
        """Collect groups until enough of them have different rewards (`RolloutSource.next_groups`).

        Raises:
            DataExhausted: Too few groups have different rewards after `max_rounds` collections.
            NothingToLearnError: No sample of these collections could be graded.
        """
        num_differing, num_seen, some_reward = 0, 0, False
        rounds: list[Rollouts] = []
        for _ in range(self._max_rounds):
            samples: list[Trajectory] = []
            surplus: list[Group] = []
            for group in sorted(self._inner.next_groups(step), key=lambda group: group.order):
                num_seen += 1
                samples += group.trajectories
                differs = group.trains and self._rewards_differ(group)
                if differs and num_differing >= self._num_groups:
                    surplus.append(group)
                yield group if differs and num_differing < self._num_groups else replace(group, trains=False)
                num_differing += differs
            rounds.append(Rollouts(samples, self._inner.metrics))
            some_reward = some_reward or any(t.has_reward for t in samples)
            if num_differing >= self._num_groups:
                self._note(rounds, num_differing, num_seen, surplus)
                return
        if not some_reward:
            raise NothingToLearnError(
                f"Dynamic sampling got no reward for any answer to {num_seen} prompts (step {step}). "
                "The trajectories and the environment's log say why; fix it and start the same command again."
            )
        raise DataExhausted(
            f"dynamic sampling found {num_differing} of {self._num_groups} prompts with differing rewards in "
            f"{num_seen} prompts (step {step}). The task is too easy or too hard for the model, or "
            f"raise dynamic_sampling_max_gen_batches={self._max_rounds} or batch_multiplier in the algorithm's section"
        )

    def _note(self, rounds: Sequence[Rollouts], num_kept: int, num_seen: int, surplus: Sequence[Group]) -> None:
        self.metrics = mean_metrics(rounds) | {
            "dynamic_sampling_num_gen_batches": float(len(rounds)),
            "dynamic_sampling_num_discarded_valid_samples": float(sum(len(g.trajectories) for g in surplus)),
            "dynamic_sampling_kept_share": num_kept / num_seen,
        }

    def _rewards_differ(self, group: Group) -> bool:
        rewards = [t.penalized_reward for t in group.trajectories if t.has_reward]
        rewards_G = torch.tensor(rewards, dtype=torch.float64)
        return len((self._scale(rewards_G) if self._scale else rewards_G).unique()) > 1
