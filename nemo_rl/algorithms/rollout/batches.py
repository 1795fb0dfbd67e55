"""A step's batch where the policy writes what it learns from.

    engines get the policy's weights ─► rollouts ─► [B, T] tensors ─► are the engines right? (first batch)

Invariant: rows are ordered by group, then sample, whenever they finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.source import RolloutSource
from nemo_rl.algorithms.rollout.sync_probe import SyncProbe
from nemo_rl.algorithms.runtime.run import Phase, StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog


class RolloutBatches:
    """Makes batches of rollouts; a `runtime.run.BatchSource`.

    Args:
        rollouts: where trajectories come from.
        refitter: keeps the engines at the policy's weights.
        probe: proves that the engines sample from the policy.
        trajectory_log: JSONL of everything that was said.
        layout: `training_batch.build_training_batch`, with all but the trajectories given.

    Attributes:
        rollouts: as given; may be replaced before the first step.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        refitter: Refitter,
        probe: SyncProbe,
        trajectory_log: TrajectoryLog,
        layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]],
    ):
        self.rollouts = rollouts
        self._refitter = refitter
        self._probe = probe
        self._trajectory_log = trajectory_log
        self._layout = layout

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""
        return self.rollouts.epoch

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """See `BatchSource.next_batch`."""
        with phase("weight_sync"):
            self._refitter.ensure_fresh()
        with phase("generation"):
            groups = sorted(self.rollouts.next_groups(step), key=lambda group: group.order)
        self._refitter.before_training()
        trajectories = []
        for index, group in enumerate(groups):
            for trajectory in group.trajectories:
                trajectory.group_index = index
                trajectories.append(trajectory)
        tensors = self._layout(trajectories)
        self._probe.check(tensors)
        return StepBatch(
            tensors,
            trajectories,
            num_prompts=len(groups),
            metrics=rollout_metrics(trajectories) | self.rollouts.metrics,
            metrics_under={"refit": self._refitter.last_sync},
        )

    def trained(self, step: int, batch: StepBatch) -> None:
        """See `BatchSource.trained`."""
        self._trajectory_log.write_training(step, batch.trajectories, batch.tensors)
        self.rollouts.trained()

    def state_dict(self) -> dict[str, Any]:
        """That of the rollouts."""
        return self.rollouts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the rollouts their state."""
        self.rollouts.load_state_dict(state)
