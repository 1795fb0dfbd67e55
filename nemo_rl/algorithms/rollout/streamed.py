"""Compute gradients of finished groups while the rest of a step is still being sampled.

    groups, as they finish ─► part of the batch ─► stages ─► Policy.accumulate
    all groups of the step ─► whole batch ─► stages (again, for the metrics) ─► Policy.finish_update

All answers come from the current weights. Forward passes of stages are made for the parts only (`part_scores`).
Invariant: an update equals the one of the whole batch up to the order of floating-point sums, because what stages and
loss compute for a group does not depend on other groups; if it does (`config.rules.overlap.needs_whole_steps`), a run
waits for all groups of a step.
With `in_order` a part has a fixed number of consecutive groups, so the order of sums does not depend on which groups
finish first, and a run repeats itself bit for bit. Otherwise a part has all groups that are finished when the policy is
free, because large parts cost less time than many small ones.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl.algorithms.rollout.part_scores import KeptScores, PartScores, ScoringParts
from nemo_rl.algorithms.rollout.source import Group, InOrder, RolloutSource, numbered
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.run import Stage, StepBatch
from nemo_rl.config import Role, RolloutMasterConfig, RolloutTrainingConfig, needs_whole_steps
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class AccumulatingPolicy(Protocol):
    """A policy that adds up gradients before an update."""

    def accumulate(self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction) -> None:
        """Add the gradients of a part of a global batch."""

    def finish_update(self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction) -> TrainResult:
        """Make the update of the global batch `data`, whose parts were accumulated."""


class Arrivals:
    """Divides the groups of a step into parts, as they finish.

    Args:
        groups_per_part: groups of a part; without `in_order` the least number.
        in_order: see `StreamedRollouts`.
    """

    def __init__(self, groups_per_part: int, *, in_order: bool) -> None:
        self._groups_per_part = groups_per_part
        self._ordered = InOrder() if in_order else None
        self._ready: list[Group] = []
        self._has_next = False

    def add(self, group: Group) -> None:
        """Take a finished group; errors as `InOrder.add`."""
        released = [group] if self._ordered is None else self._ordered.add(group)
        self._ready += [each for each in released if each.trains]
        self._has_next = group.has_next

    def parts(self) -> Iterator[list[Group]]:
        """Give the parts that are complete; without `in_order` none as long as another group is finished already."""
        if self._ordered is None:
            if len(self._ready) >= self._groups_per_part and not self._has_next:
                part, self._ready = self._ready, []
                yield part
            return
        while len(self._ready) >= self._groups_per_part:
            part, self._ready = self._ready[: self._groups_per_part], self._ready[self._groups_per_part :]
            yield part

    def last_parts(self) -> Iterator[list[Group]]:
        """Give the rest, when all groups are finished; the last part may have fewer groups."""
        if self._ordered is not None:
            self._ready += [each for each in self._ordered.rest() if each.trains]
        yield from self.parts()
        if self._ready:
            yield self._ready


@dataclass
class StreamedRollouts:
    """Passes the groups of a source on, and trains on them meanwhile; a source and a `runtime.run.Trainer`."""

    inner: RolloutSource
    """Gives the groups."""
    policy: AccumulatingPolicy
    """Adds up gradients."""
    loss_fn: AnyLossFunction
    """Loss of the policy."""
    stages: Sequence[Stage]
    """As in `Run`, with models that score parts."""
    stages_of_steps: list[Stage]
    """As in `Run`, with the scores of the parts."""
    scores: Sequence[PartScores]
    memory: MemorySharing
    layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]]
    """As in `RolloutBatches`."""
    groups_per_part: int
    """Groups of a part; the last part of a step may have fewer, and parts that are not `in_order` may have more."""
    busy: Callable[[], AbstractContextManager[None]]
    """Counts a block as work of the trainer."""
    in_order: bool = True
    """Parts have consecutive groups; False: those that are finished."""
    _rewards: list[tuple[Trajectory, float | None]] = field(default_factory=list, init=False)
    """Trained trajectories of the step, with the rewards that were used."""

    max_staleness = 0

    @property
    def metrics(self) -> dict[str, float]:
        """See `RolloutSource.metrics`."""
        return self.inner.metrics

    def next_groups(self, step: int) -> Iterator[Group]:
        """See `RolloutSource.next_groups`."""
        arrivals = Arrivals(self.groups_per_part, in_order=self.in_order)
        for group in self.inner.next_groups(step):
            yield group
            arrivals.add(group)
            for part in arrivals.parts():
                self._accumulate(part)
        for part in arrivals.last_parts():
            self._accumulate(part)

    def _accumulate(self, groups: Sequence[Group]) -> None:
        trajectories = numbered(groups)
        self._rewards += [(trajectory, trajectory.reward) for trajectory in trajectories]
        with self.busy():
            part = StepBatch(self.layout(trajectories), trajectories)
            for stage in self.stages:
                self.memory.hand_to(stage.roles)
                stage.apply(part)
            self.memory.hand_to(("policy",))
            self.policy.accumulate(part.tensors, self.loss_fn)

    def train(
        self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | Sequence[int] | None = None
    ) -> TrainResult:
        """Make the update of a step; see `runtime.run.Trainer`.

        Raises:
            ConfigError: an environment has changed rewards after all groups were finished.
        """
        changed = sorted({sample.task_name for sample, reward in self._rewards if sample.reward != reward})
        self._rewards = []
        for scores in self.scores:
            scores.clear()
        if changed:
            raise ConfigError(
                f"The environments {changed} correct rewards when all groups of a step are finished, but "
                "overlap.mode=stream has trained on them already. Set post_processes_groups in the class, or use "
                "overlap.mode=none or ahead."
            )
        return self.policy.finish_update(data, loss_fn)


def trains_in_parts(config: RolloutMasterConfig, roles: Mapping[str, Role]) -> bool:
    """Return whether a run computes gradients of parts of a step; log why not if `overlap.mode=stream` asks for it.

    Args:
        config: the configuration.
        roles: the models of the run.
    """
    algorithm = config.algorithm
    if algorithm.overlap.mode != "stream":
        return False
    reasons = needs_whole_steps(algorithm, config.policy)
    others = sorted(name for name, role in roles.items() if role.trains and name != "policy")
    reasons += [f"the models {others} are trained on whole steps"] if others else []
    for reason in reasons:
        logger.warning("overlap.mode=stream: each step waits for all of its groups, because %s.", reason)
    return not reasons


def streamed_rollouts(
    algorithm: RolloutTrainingConfig,
    groups: RolloutSource,
    models: Mapping[str, Policy],
    loss_fn: AnyLossFunction,
    make_stages: Callable[[Mapping[str, Any]], list[Stage]],
    memory: MemorySharing,
    layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]],
    idle: IdleShares,
) -> StreamedRollouts:
    """Build the source of `overlap.mode=stream`.

    Args:
        algorithm: the algorithm's section.
        groups: gives the groups.
        models: the models of the run, by name.
        loss_fn: as in `StreamedRollouts`.
        make_stages: builds stages from models, or from objects that score as they do.
        memory: as in `StreamedRollouts`.
        layout: as in `StreamedRollouts`.
        idle: counts the work of the trainer.
    """
    scores = {name: PartScores() for name in models}
    overlap = algorithm.overlap
    return StreamedRollouts(
        inner=groups,
        policy=models["policy"],
        loss_fn=loss_fn,
        stages=make_stages({name: ScoringParts(model, scores[name]) for name, model in models.items()}),
        stages_of_steps=make_stages({name: KeptScores(of_model) for name, of_model in scores.items()}),
        scores=list(scores.values()),
        memory=memory,
        layout=layout,
        groups_per_part=overlap.groups_per_part or max(1, algorithm.num_prompts_per_step // 4),
        busy=idle.trainer_works,
        in_order=overlap.order == "in_order",
    )
