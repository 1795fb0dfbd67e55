"""Compute gradients of finished groups while the rest of a step is still being sampled.

    groups, as they finish ─► part of the batch ─► stages ─► Policy.accumulate
    all groups of the step ─► whole batch ─► stages (again, for the metrics) ─► Policy.finish_update

All answers come from the current weights. Invariant: an update equals the one of the whole batch up to the order of
floating-point sums, because what stages and loss compute for a group does not depend on other groups
(`config.rules.overlap.check_stream` refuses what does).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl.algorithms.rollout.source import Group, RolloutSource, numbered
from nemo_rl.algorithms.runtime.run import Stage, StepBatch
from nemo_rl.config import RolloutTrainingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.utils.errors import ConfigError


class AccumulatingPolicy(Protocol):
    """A policy that adds up gradients before an update."""

    def accumulate(self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction) -> None:
        """Add the gradients of a part of a global batch."""

    def finish_update(self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction) -> TrainResult:
        """Make the update of the global batch `data`, whose parts were accumulated."""


@dataclass
class StreamedRollouts:
    """Passes the groups of a source on, and trains on them meanwhile; a source and a `runtime.run.Trainer`.

    Attributes:
        inner: gives the groups.
        policy: adds up gradients.
        loss_fn: loss of the policy.
        stages: as in `Run`.
        layout: as in `RolloutBatches`.
        groups_per_part: groups of a part; the last part of a step may have fewer.
        busy: counts a block as work of the trainer.
    """

    inner: RolloutSource
    policy: AccumulatingPolicy
    loss_fn: AnyLossFunction
    stages: Sequence[Stage]
    layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]]
    groups_per_part: int
    busy: Callable[[], AbstractContextManager[None]]
    _waiting: list[Group] = field(default_factory=list, init=False)
    _rewards: list[tuple[Trajectory, float | None]] = field(default_factory=list, init=False)
    """Trained trajectories of the step, with the rewards that were used."""

    max_staleness = 0

    @property
    def metrics(self) -> dict[str, float]:
        """See `RolloutSource.metrics`."""
        return self.inner.metrics

    def next_groups(self, step: int) -> Iterator[Group]:
        """See `RolloutSource.next_groups`."""
        for group in self.inner.next_groups(step):
            yield group
            if group.trains:
                self._waiting.append(group)
            if len(self._waiting) == self.groups_per_part:
                self._accumulate()
        if self._waiting:
            self._accumulate()

    def _accumulate(self) -> None:
        trajectories, self._waiting = numbered(self._waiting), []
        self._rewards += [(trajectory, trajectory.reward) for trajectory in trajectories]
        with self.busy():
            part = StepBatch(self.layout(trajectories), trajectories)
            for stage in self.stages:
                stage.apply(part)
            self.policy.accumulate(part.tensors, self.loss_fn)

    def train(self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | None = None) -> TrainResult:
        """Make the update of a step; see `runtime.run.Trainer`.

        Raises:
            ConfigError: an environment has changed rewards after all groups were finished.
        """
        changed = sorted({sample.task_name for sample, reward in self._rewards if sample.reward != reward})
        self._rewards = []
        if changed:
            raise ConfigError(
                f"The environments {changed} correct rewards when all groups of a step are finished, but "
                "grpo.overlap.mode=stream has trained on them already. Set post_processes_groups in the class, or use "
                "grpo.overlap.mode=none or ahead."
            )
        return self.policy.finish_update(data, loss_fn)


def streamed_rollouts(
    algorithm: RolloutTrainingConfig,
    groups: RolloutSource,
    policy: AccumulatingPolicy,
    loss_fn: AnyLossFunction,
    stages: Sequence[Stage],
    layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]],
    idle: IdleShares,
) -> StreamedRollouts | None:
    """Build the source of `overlap.mode=stream`; None for the other modes. Arguments as in `StreamedRollouts`."""
    if algorithm.overlap.mode != "stream":
        return None
    groups_per_part = algorithm.overlap.groups_per_part or max(1, algorithm.num_prompts_per_step // 4)
    return StreamedRollouts(groups, policy, loss_fn, stages, layout, groups_per_part, idle.trainer_works)
