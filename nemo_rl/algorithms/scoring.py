"""Add the log-probabilities of the policy and of the reference policy to a batch, if the update needs them.

Invariant: a forward pass is skipped only when its result cannot change the update.
"""

import logging
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.rollout.batches import mask_sequences, masked_metrics
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import PolicyGradientMasterConfig
from nemo_rl.losses.divergence import MISMATCH_METRICS
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.policy.interfaces import ScoringModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyScoring:
    """Stage that adds log-probabilities to a batch (`runtime.run.Stage`).

    `forward_passes` decides once which of the two forward passes a run needs. With one optimizer update per batch, the
    update's forward pass uses the same weights as a separate pass. The stage then omits `prev_logprobs`, and the loss
    uses its detached current log-probabilities. Results are the same, with a third less work.
    """

    policy: ScoringModel
    """The model that computes the log-probabilities."""
    needs_prev: bool
    """Whether `prev_logprobs` are computed in a separate forward pass."""
    needs_reference: bool
    """Whether `reference_policy_logprobs` are computed."""
    max_sequence_error: float | None = None
    """Rows are masked if their training and generation log-probabilities differ by more. If None, none is masked."""
    corrects_staleness: bool = False
    """Whether the loss itself corrects for stale tokens (`apply`)."""

    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `prev_logprobs` and `reference_policy_logprobs` `[B, T]` if the run needs them.

        Without `prev_logprobs` the loss measures the mismatch of each sequence. It then needs the number of sequences
        that count, which is written as `num_counted_samples`.

        The ratio in the loss compares the current policy with the policy that sampled. For a token sampled by the
        current weights, the sampling policy is the policy before the update. For a stale token it is an older policy,
        whose weights no longer exist, so the engine's `generation_logprobs` are used. With `corrects_staleness`, all
        tokens use the policy before the update, because the importance weights of the loss are relative to it.

        If engine log-probabilities are used, metrics that compare policy and engine would compare the engine with
        itself. They are left out of such a step (`StepBatch.unmeasured`).

        Returns:
            Metrics of the mismatch of sequences, and of the mask that follows from it.
        """
        rows = BatchRows.of(batch.tensors)
        num_stale_B = None if self.corrects_staleness else batch.num_stale_B
        if num_stale_B is not None:
            batch.unmeasured = batch.unmeasured | MISMATCH_METRICS
        errors_B = None
        if self.needs_prev or num_stale_B is not None:
            errors_B = rows.score(self.policy, num_stale_B)
        if self.needs_reference:
            rows.score_reference(self.policy)
        if errors_B is None:
            mask_B = batch.tensors["sample_mask"]
            batch.tensors["num_counted_samples"] = torch.full_like(mask_B, float(rows.counted().sum()))
            return masked_metrics()
        rewards = [row.reward for row in batch.rows]
        return batch.measured(mask_sequences(batch.tensors, errors_B, rewards, self.max_sequence_error))


def corrects_staleness(config: PolicyGradientMasterConfig) -> bool:
    """Return whether the loss handles stale tokens with `prev_logprobs` of the current policy."""
    return config.loss_fn.corrects_staleness


def policy_scoring(
    config: PolicyGradientMasterConfig, policy: ScoringModel, needs_prev: bool, needs_reference: bool
) -> PolicyScoring:
    """Build the scoring stage of a run, and log the metrics that it cannot measure."""
    corrects = corrects_staleness(config)
    if config.algorithm.overlap.mode == "ahead" and not corrects:
        logger.info(
            "overlap.mode=ahead without loss_fn.use_importance_sampling_correction: in steps with tokens of older "
            "weights the mismatch of policy and engines is not measured, and these metrics are not logged: %s.",
            ", ".join(sorted(MISMATCH_METRICS)),
        )
    return PolicyScoring(policy, needs_prev, needs_reference, config.algorithm.seq_logprob_error_threshold, corrects)


def forward_passes(config: PolicyGradientMasterConfig, loss_fn: LossFunction, *, for_credit: bool) -> tuple[bool, bool]:
    """Return whether a run needs `prev_logprobs` and reference log-probabilities (`PolicyScoring`).

    The answer is for batches that the current weights sampled. `PolicyScoring` adds `prev_logprobs` to batches with
    stale tokens. A user's own loss always gets `prev_logprobs`. It gets reference log-probabilities if it or the
    configured loss needs them.

    Args:
        for_credit: Whether advantages depend on both kinds of log-probabilities.
    """
    on_policy = config.loss_fn.force_on_policy_ratio or config.updates_per_step <= 1
    own = not isinstance(loss_fn, ClippedPGLossFn)
    needs_prev = own or not on_policy or config.algorithm.seq_logprob_error_threshold is not None
    needs_reference = getattr(loss_fn, "needs_reference", False)
    if own:
        needs_reference = needs_reference or ClippedPGLossFn(config.loss_fn).needs_reference
    return needs_prev or for_credit, needs_reference or for_credit
