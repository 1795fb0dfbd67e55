"""Turn rewards into the advantage of every token: scaling, shaping, group statistics, whitening.

Invariant: samples without a reward enter no statistic; samples with one do, even if the loss leaves them out; and the
reward on the trajectory stays as the environment gave it, for metrics.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.algorithms.credit.advantages import AdvantageEstimator, AdvantageExtras
from nemo_rl.algorithms.credit.reward_shaping import scale_rewards, shape_rewards
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Outcome, Trajectory, is_right
from nemo_rl.losses.reductions import masked_mean


class CreditAssignment:
    """The stage that writes advantages into a batch."""

    def __init__(self, estimator: AdvantageEstimator, config: GRPOConfig):
        self._estimator = estimator
        self._config = config

    @property
    def needs_logprobs(self) -> bool:
        """True if the estimator reads `prev_logprobs` and `reference_policy_logprobs`."""
        return self._estimator.needs_logprobs

    name = "advantage_calculation"
    roles: tuple[str, ...] = ()

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Call `assign` as a stage of a run (`runtime.run.Stage`)."""
        return self.assign(batch.tensors, batch.trajectories)

    def assign(self, batch: BatchedDataDict[Any], trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Write `advantages [B, T]` and `positive_examples [B]` into the batch.

        A sample that the loss leaves out (`sample_mask` 0) still enters baselines and deviations, because its reward
        shows how hard the prompt is; its own advantage is 0. Whitening over tokens uses the tokens that count.

        Args:
            batch: a training batch whose rows are the trajectories, in order.
            trajectories: B rollouts.

        Returns:
            Metrics: shaped reward and spread of the advantages.
        """
        weight_B = batch["sample_mask"]
        mask_BT = batch["token_mask"] * weight_B[:, None]
        rewards_B = self._training_rewards(trajectories)
        turn_rewards = [torch.tensor(t.turn_rewards, dtype=torch.float32) for t in trajectories]
        turn_spans = [torch.tensor(t.turn_spans, dtype=torch.int64).reshape(-1, 2) for t in trajectories]
        extras: AdvantageExtras = {
            "group_ids": torch.tensor([t.group_index for t in trajectories]),
            "valid_mask": torch.tensor([float(t.reward is not None) for t in trajectories]),
            "reward_components": self._components(trajectories),
            "turn_rewards": pad_sequence(turn_rewards, batch_first=True),
            "turn_spans": pad_sequence(turn_spans, batch_first=True),
        }
        if self.needs_logprobs:
            extras["logprobs_policy"] = batch["prev_logprobs"]
            extras["logprobs_reference"] = batch["reference_policy_logprobs"]
        advantages = self._estimator.compute_advantage(None, rewards_B, mask_BT, **extras)
        batch["advantages"] = advantages.float()
        batch["positive_examples"] = torch.tensor([float(is_right(t.reward)) for t in trajectories])
        return {
            "filtered_reward": float(masked_mean(rewards_B, weight_B)),
            **_spread("advantages", advantages[mask_BT > 0]),
        }

    def _training_rewards(self, trajectories: Sequence[Trajectory]) -> Tensor:
        rewards_B = torch.tensor([t.reward or 0.0 for t in trajectories])
        lengths_B = torch.tensor([t.response_length for t in trajectories])
        truncated_B = torch.tensor([t.outcome == Outcome.TRUNCATED for t in trajectories])
        rewards_B = scale_rewards(rewards_B, self._config.reward_scaling)
        return shape_rewards(rewards_B, lengths_B, truncated_B, self._config.reward_shaping)

    def _components(self, trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
        """Return the scaled reward components by name, each `[B]`; shaping applies to the total reward only."""
        names = sorted({name for t in trajectories for name in t.reward_components})
        rewards = {name: torch.tensor([t.reward_components.get(name, 0.0) for t in trajectories]) for name in names}
        return {name: scale_rewards(values_B, self._config.reward_scaling) for name, values_B in rewards.items()}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {f"{name}/mean": 0.0, f"{name}/max": 0.0, f"{name}/min": 0.0}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
