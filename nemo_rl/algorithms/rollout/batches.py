"""Make a step's batch from rollouts of the policy.

    engines get the policy's weights ─► rollouts ─► [B, T] tensors ─► check of the engines (first batch)

Invariant: rows are ordered by group, then sample, whatever the order in which they finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.source import Group, RolloutSource
from nemo_rl.algorithms.rollout.staleness import age_metrics, check_staleness, stale_tokens
from nemo_rl.algorithms.rollout.sync_probe import SyncProbe
from nemo_rl.algorithms.runtime.run import Phase, StepBatch
from nemo_rl.data.prompt_stream import PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog


class RolloutBatches:
    """Makes batches of rollouts; a `runtime.run.BatchSource`.

    Args:
        rollouts: gives the trajectories.
        prompts: the stream that the prompts come from; the prompts of trained batches are acknowledged there.
        refitter: keeps the engines at the policy's weights.
        probe: checks that the engines sample from the policy.
        trajectory_log: writes conversations and rewards.
        layout: `training_batch.build_training_batch`, with all arguments but the trajectories bound.
        idle: measures how long trainer, engines and environments have nothing to do.

    Attributes:
        rollouts: as passed; may be replaced before the first step.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        prompts: PromptStream,
        refitter: Refitter,
        probe: SyncProbe,
        trajectory_log: TrajectoryLog,
        layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]],
        idle: IdleShares,
    ):
        self.rollouts = rollouts
        self._prompts = prompts
        self._refitter = refitter
        self._probe = probe
        self._trajectory_log = trajectory_log
        self._layout = layout
        self._idle = idle

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """See `BatchSource.next_batch`.

        Raises:
            ValueError: the source gave a group that is older than it states.
        """
        with phase("weight_sync"), self._idle.trainer_waits():
            self._refitter.ensure_fresh()
        with phase("generation"), self._idle.trainer_waits():
            given = sorted(self.rollouts.next_groups(step), key=lambda group: group.order)
        self._refitter.before_training()
        groups = [group for group in given if group.trains]
        trajectories = []
        for index, group in enumerate(groups):
            for trajectory in group.trajectories:
                trajectory.group_index = index
                trajectories.append(trajectory)
        tensors = self._layout(trajectories)
        version, max_staleness = self._refitter.weight_version, self.rollouts.max_staleness
        check_staleness(trajectories, version, max_staleness)
        stale_BT = stale_tokens(trajectories, version)
        self._probe.check(tensors, stale_BT)
        overlap = age_metrics(trajectories, version) | _discarded(given) if max_staleness else {}
        return StepBatch(
            tensors,
            trajectories,
            num_prompts=len(groups),
            metrics=rollout_metrics(trajectories) | overlap | self.rollouts.metrics,
            metrics_under={"refit": self._refitter.last_sync, "idle": self._idle.since_last_call()},
            prompts=[group.prompt for group in given if group.prompt is not None],
            stale_BT=stale_BT,
        )

    def trained(self, step: int, batch: StepBatch) -> None:
        """See `BatchSource.trained`."""
        self._trajectory_log.write_training(step, batch.trajectories, batch.tensors)
        self._prompts.acknowledge(batch.prompts)


def _discarded(groups: Sequence[Group]) -> dict[str, float]:
    """Count the sampled tokens that no update uses."""
    tokens = sum(t.response_length for group in groups if not group.trains for t in group.trajectories)
    return {"num_discarded_tokens": float(tokens)}
