"""Compute log-probabilities of a training batch under the current and the reference policy.

`grpo.forward_passes` decides once which of the two forward passes a run needs. With one optimizer update per batch the
update's own forward pass sees the same weights as a separate one would, so `prev_logprobs` are left out and the loss
takes its current ones, detached: same numbers, a third less work. Invariant: a pass is skipped only when its result
cannot change the update.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.rollout.training_batch import (
    mask_mismatched_sequences,
    masked_metrics,
    num_counted_samples,
)
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import PolicyInterface


@dataclass(frozen=True)
class PolicyScoring:
    """The stage that adds log-probabilities; a `runtime.run.Stage`.

    Attributes:
        policy: the model that scores.
        needs_prev: whether `prev_logprobs` are computed separately from the update.
        needs_reference: whether `reference_policy_logprobs` are computed.
        max_sequence_error: mask samples whose training/generation ratio exceeds this; None for never.
        corrects_staleness: whether the loss itself accounts for stale tokens; see `apply`.
    """

    policy: PolicyInterface
    needs_prev: bool
    needs_reference: bool
    max_sequence_error: float | None = None
    corrects_staleness: bool = False

    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `prev_logprobs` and `reference_policy_logprobs` `[B, T]` if the run needs them.

        Without `prev_logprobs` the loss measures the mismatch of each sequence. It then needs the number of sequences
        that count, which is written as `num_counted_samples`.

        The ratio of a loss is between the current policy and the one that sampled. For a token of the current weights
        this is the policy before the update. For a stale token it is an older policy, whose weights no longer exist, so
        the engine's log-probability (`generation_logprobs`) is used. With `corrects_staleness` all tokens have the
        policy before the update, because the importance weights of the loss are relative to it.

        Returns:
            Metrics of the mismatch of sequences, and of the mask that follows from it.
        """
        tensors = batch.tensors
        stale_BT = None if self.corrects_staleness else batch.stale_BT
        if self.needs_prev or stale_BT is not None:
            tensors["prev_logprobs"] = self._prev_logprobs(tensors, stale_BT)
        if self.needs_reference:
            scored = self.policy.get_reference_policy_logprobs(tensors)
            tensors["reference_policy_logprobs"] = scored["reference_logprobs"]
        if "prev_logprobs" not in tensors:
            count = float(num_counted_samples(tensors))
            tensors["num_counted_samples"] = torch.full_like(tensors["sample_mask"], count)
            return masked_metrics()
        rewards = [trajectory.reward for trajectory in batch.trajectories]
        return mask_mismatched_sequences(tensors, rewards, self.max_sequence_error)

    def _prev_logprobs(self, tensors: BatchedDataDict[Any], stale_BT: Tensor | None) -> Tensor:
        """Compute the log-probabilities `[B, T]` that the ratio is relative to; see `apply`."""
        if stale_BT is None:
            return self.policy.get_logprobs(tensors)["logprobs"]
        sampled_BT = tensors["generation_logprobs"]
        if not ((tensors["token_mask"] > 0) & ~stale_BT).any():
            return sampled_BT.clone()
        return torch.where(stale_BT, sampled_BT, self.policy.get_logprobs(tensors)["logprobs"])
