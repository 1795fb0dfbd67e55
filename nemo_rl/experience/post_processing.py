"""Let environments correct the rewards of finished groups and collections, and report metrics about them.

Invariants: a reward that an environment does not change keeps its value, bit for bit. An environment that fails here
changes no reward.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.utils.log_backends.tracker import to_scalars

logger = logging.getLogger(__name__)

type _Batch = BatchedDataDict[Any]


class PostProcessor(Protocol):
    """Methods of an environment that process finished groups and collections."""

    @property
    def post_processes_groups(self) -> bool:
        """Return whether the environment processes single groups (`EnvironmentInterface.post_processes_groups`)."""

    async def global_post_process_and_metrics(self, batch: _Batch) -> tuple[_Batch, dict[str, float | int]]:
        """Correct rewards and return metrics (`EnvironmentInterface.global_post_process_and_metrics`)."""


async def post_process(
    environments: Mapping[str, PostProcessor], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Let each environment correct the rewards of its own trajectories, in place.

    Args:
        environments: Environments by task name. Trajectories of other tasks are not changed.
        trajectories: Trajectories of one group, or of a whole collection.

    Returns:
        The environments' metrics as `<environment>/<name>`.
    """
    graded: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None and trajectory.task_name in environments:
            graded.setdefault(trajectory.task_name, []).append(trajectory)
    found = await asyncio.gather(*(_post_process(name, environments[name], own) for name, own in graded.items()))
    return {f"{name}/{metric}": value for name, own in zip(graded, found, strict=True) for metric, value in own.items()}


async def _post_process(name: str, environment: PostProcessor, own: list[Trajectory]) -> dict[str, float]:
    batch, components = _rollout_batch(own)
    before = batch["rewards"].clone()
    batch, metrics = await environment.global_post_process_and_metrics(batch)
    after = torch.as_tensor(batch["rewards"])
    if after.shape != before.shape or not after.isfinite().all():
        logger.warning(
            "Environment %r returned rewards of shape %s for %s, or some that are not finite; they stay as they were.",
            name,
            list(after.shape),
            list(before.shape),
        )
        return to_scalars(metrics)
    changed = (after.to(before) != before).reshape(len(own), -1).any(dim=1)
    for row in changed.nonzero().flatten().tolist():
        _correct(own[row], components, after[row])
    return to_scalars(metrics)


def _rollout_batch(own: list[Trajectory]) -> tuple[_Batch, list[str]]:
    """Build the batch for `EnvironmentInterface.global_post_process_and_metrics`.

    Returns:
        The batch and the names of the reward components.
    """
    components = list(dict.fromkeys(name for t in own for name in t.reward_components))
    total = torch.tensor([t.reward for t in own], dtype=torch.float32)
    parts = torch.tensor([[t.reward_components.get(name, 0.0) for name in components] for t in own])
    truncated = torch.tensor([t.outcome == Outcome.TRUNCATED for t in own])
    batch: _Batch = BatchedDataDict(
        rewards=parts if components else total.clone(),
        total_reward=total,
        is_end=(~truncated).long(),
        truncated=truncated,
        generation_lengths=torch.tensor([t.response_length for t in own]),
        prompt_lengths=torch.tensor([t.prompt_length for t in own]),
        text=[t.prompt_text for t in own],
        message_log=[t.turns for t in own],
        extra_env_info=[t.extra_env_info for t in own],
        idx=[t.idx for t in own],
    )
    return batch, components


def _correct(trajectory: Trajectory, components: list[str], reward: Tensor) -> None:
    if components:
        trajectory.reward_components = dict(zip(components, reward.tolist(), strict=True))
    corrected = float(reward.sum())
    if trajectory.turn_rewards and trajectory.reward is not None:
        trajectory.turn_rewards[-1] += corrected - trajectory.reward  # the last turn gets the correction of the sample
    trajectory.reward = corrected
