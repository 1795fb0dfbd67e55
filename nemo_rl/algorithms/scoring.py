"""Add the log-probabilities of the policy and of the reference policy to a batch, where the update needs them.

Invariant: a forward pass is skipped only when its result cannot change the update.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.rollout.batches import (
    mask_mismatched_sequences,
    mask_sequences,
    masked_metrics,
    num_counted_samples,
)
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import PolicyGradientMasterConfig
from nemo_rl.data.stored_rows import NUM_STALE, NUM_WRITTEN, STORED_ROWS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.divergence import MISMATCH_METRICS
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.policy.interfaces import ScoringModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyScoring:
    """Adds log-probabilities to a batch, as a `runtime.run.Stage`.

    `forward_passes` decides once which of the two forward passes a run needs. With one optimizer update per batch the
    update's own forward pass sees the same weights as a separate one would, so `prev_logprobs` are left out and the
    loss takes its current ones, detached: same numbers, a third less work.
    """

    policy: ScoringModel
    """The model that scores."""
    needs_prev: bool
    """Whether `prev_logprobs` are computed separately from the update."""
    needs_reference: bool
    """Whether `reference_policy_logprobs` are computed."""
    max_sequence_error: float | None = None
    """Mask rows whose training/generation ratio exceeds this; None for never."""
    corrects_staleness: bool = False
    """Whether the loss itself accounts for stale tokens; see `apply`."""

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

        Metrics that compare policy and engine would then compare the engine's numbers with themselves, so they are left
        out of a step with such tokens (`StepBatch.unmeasured`).

        Returns:
            Metrics of the mismatch of sequences, and of the mask that follows from it.
        """
        tensors = batch.tensors
        rewards = [row.reward for row in batch.rows]
        if not self.corrects_staleness and (batch.stale_BT is not None or NUM_STALE in tensors):
            batch.unmeasured = batch.unmeasured | MISMATCH_METRICS
        if STORED_ROWS in tensors:
            return batch.measured(self._score_stored(tensors, rewards))
        stale_BT = None if self.corrects_staleness else batch.stale_BT
        if self.needs_prev or stale_BT is not None:
            tensors["prev_logprobs"] = self._prev_logprobs(tensors, stale_BT)
        if self.needs_reference:
            scored = self.policy.get_reference_policy_logprobs(tensors)
            tensors["reference_policy_logprobs"] = scored["reference_logprobs"]
        if "prev_logprobs" not in tensors:
            return _count_samples(tensors)
        return batch.measured(mask_mismatched_sequences(tensors, rewards, self.max_sequence_error))

    def _score_stored(self, tensors: BatchedDataDict[Any], rewards: Sequence[float | None]) -> dict[str, float]:
        """Do as `apply` for stored rows: log-probabilities stay in the object store."""
        if self.corrects_staleness:
            tensors.pop(NUM_STALE, None)
        if self.needs_reference:
            tensors["reference_policy_logprobs"], _ = self.policy.keep_logprobs(tensors, of_reference=True)
        if not (self.needs_prev or NUM_STALE in tensors):
            return _count_samples(tensors)
        if NUM_STALE in tensors and bool((tensors[NUM_STALE] >= tensors["input_lengths"]).all()):
            tensors["prev_logprobs"] = [None] * tensors.size  # the engines' own, so each error is exp(0)
            errors_B = (tensors[NUM_WRITTEN] > 0).float() * (tensors["sample_mask"] != 0)
        else:
            tensors["prev_logprobs"], errors_B = self.policy.keep_logprobs(tensors)
        return mask_sequences(tensors, errors_B, rewards, self.max_sequence_error)

    def _prev_logprobs(self, tensors: BatchedDataDict[Any], stale_BT: Tensor | None) -> Tensor:
        """Compute the log-probabilities `[B, T]` to which the ratio is relative (see `apply`)."""
        if stale_BT is None:
            return self.policy.get_logprobs(tensors)["logprobs"]
        sampled_BT = tensors["generation_logprobs"]
        if not ((tensors["token_mask"] > 0) & ~stale_BT).any():
            return sampled_BT.clone()
        return torch.where(stale_BT, sampled_BT, self.policy.get_logprobs(tensors)["logprobs"])


def _count_samples(tensors: BatchedDataDict[Any]) -> dict[str, float]:
    """Write `num_counted_samples`, and return the metrics of a batch in which no sample is masked."""
    tensors["num_counted_samples"] = torch.full_like(tensors["sample_mask"], float(num_counted_samples(tensors)))
    return masked_metrics()


def corrects_staleness(config: PolicyGradientMasterConfig) -> bool:
    """Return whether the loss handles stale tokens with `prev_logprobs` of the current policy."""
    return config.loss_fn.corrects_staleness


def policy_scoring(
    config: PolicyGradientMasterConfig, policy: ScoringModel, needs_prev: bool, needs_reference: bool
) -> PolicyScoring:
    """Build the stage of a run, and log what it cannot measure (see `PolicyScoring`)."""
    corrects = corrects_staleness(config)
    if config.algorithm.overlap.mode == "ahead" and not corrects:
        logger.info(
            "overlap.mode=ahead without loss_fn.use_importance_sampling_correction: in steps with tokens of older "
            "weights the mismatch of policy and engines is not measured, and these metrics are not logged: %s.",
            ", ".join(sorted(MISMATCH_METRICS)),
        )
    return PolicyScoring(policy, needs_prev, needs_reference, config.algorithm.seq_logprob_error_threshold, corrects)


def forward_passes(config: PolicyGradientMasterConfig, loss_fn: LossFunction, *, for_credit: bool) -> tuple[bool, bool]:
    """Return whether a run needs `prev_logprobs` and reference log-probabilities (see `PolicyScoring`).

    This holds for batches of the policy's current weights; `PolicyScoring` adds `prev_logprobs` to batches with stale
    tokens. A loss of another kind than the configured one always gets `prev_logprobs`, and reference log-probabilities
    if it or the configured loss needs them.

    Args:
        for_credit: whether advantages are computed from both.
    """
    on_policy = config.loss_fn.force_on_policy_ratio or config.updates_per_step <= 1
    own = not isinstance(loss_fn, ClippedPGLossFn)
    needs_prev = own or not on_policy or config.algorithm.seq_logprob_error_threshold is not None
    needs_reference = getattr(loss_fn, "needs_reference", False)
    if own:
        needs_reference = needs_reference or ClippedPGLossFn(config.loss_fn).needs_reference
    return needs_prev or for_credit, needs_reference or for_credit
