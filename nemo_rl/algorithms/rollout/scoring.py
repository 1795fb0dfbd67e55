"""Log-probabilities of a training batch under the current and the reference policy.

Decides once which of the two forward passes a run needs. With one optimizer update per batch the update's own forward
pass sees the same weights as a separate one would, so `prev_logprobs` are left out and the loss takes its current ones,
detached: same numbers, a third less work. Invariant: a pass is skipped only when its result cannot change the update.
"""

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.rollout.training_batch import (
    mask_mismatched_sequences,
    masked_metrics,
    num_counted_samples,
)
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.models.policy.interfaces import PolicyInterface


@dataclass(frozen=True)
class PolicyScoring:
    """The stage that adds log-probabilities; a `runtime.run.Stage`.

    Attributes:
        policy: what scores.
        needs_prev: whether `prev_logprobs` are computed apart from the update.
        needs_reference: whether `reference_policy_logprobs` are computed.
        max_sequence_error: mask samples whose training/generation ratio exceeds this; None for never.
    """

    policy: PolicyInterface
    needs_prev: bool
    needs_reference: bool
    max_sequence_error: float | None = None

    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `prev_logprobs` and `reference_policy_logprobs` `[B, T]` as far as the run needs them.

        Without `prev_logprobs` the loss measures the mismatch of each sequence, so it is told how many there are.

        Returns:
            Metrics of the mismatch of sequences, and of the mask that follows from it.
        """
        tensors = batch.tensors
        if self.needs_prev:
            tensors["prev_logprobs"] = self.policy.get_logprobs(tensors)["logprobs"]
        if self.needs_reference:
            scored = self.policy.get_reference_policy_logprobs(tensors)
            tensors["reference_policy_logprobs"] = scored["reference_logprobs"]
        if not self.needs_prev:
            count = float(num_counted_samples(tensors))
            tensors["num_counted_samples"] = torch.full_like(tensors["sample_mask"], count)
            return masked_metrics()
        rewards = [trajectory.reward for trajectory in batch.trajectories]
        return mask_mismatched_sequences(tensors, rewards, self.max_sequence_error)
