"""The policy-gradient loss: GRPO, PPO clip, DAPO, GSPO, CISPO, REINFORCE and their corrections.

Composed of `ratios`, `objectives`, `kl`, `policy_batch` and `mismatch`. Invariant: every option is decided once, at
construction, by choosing a function; `__call__` runs the same lines for all of them.

    loss = reduce(w * objective(log p, ratio, A)) + beta * reduce(KL to the reference)

`reduce` sums over tokens and divides by the global token count, or by a constant for each sample (Dr.GRPO), or by each
sample's own length; the last two divide by the global sample count besides. The KL term has the full gradient of the
divergence, score-function part included, see `kl`.

Legend: `B` samples, `T` predicted positions.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from nemo_rl.config import ClippedPGLossConfig, check_loss_options, report_findings
from nemo_rl.losses.interfaces import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.kl import calculate_kl
from nemo_rl.losses.mismatch import mismatch_metrics
from nemo_rl.losses.objectives import clip_ratio, make_objective
from nemo_rl.losses.policy_batch import PolicyBatch, make_policy_batch
from nemo_rl.losses.ratios import (
    ImportanceWeights,
    RatioFn,
    make_truncation,
    sequence_mean_ratio,
    sequence_product_ratio,
    token_ratio,
)
from nemo_rl.losses.reductions import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    safe_divide,
)

type TermFn = Callable[[PolicyBatch], Tensor]
"""PolicyBatch -> loss_BT."""


class ClippedPGLossFn:
    """Policy-gradient loss with clipping, KL penalty and correction of train/generation mismatch.

    Example:
        >>> loss_fn = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_max=0.28))
        >>> loss, metrics = loss_fn(logprobs, data, global_valid_seqs=64, global_valid_toks=4096)
    """

    input_type = LossInputType.LOGPROB
    rows_per_unit = 1

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, Any]) -> None:
        """Choose ratio, objective, weights, reduction and penalty terms.

        Args:
            cfg: The `loss_fn` section; a dict is checked and filled in.

        Raises:
            ConfigError: Options contradict each other or a value is out of range.
        """
        cfg = ClippedPGLossConfig.of(cfg)
        report_findings(check_loss_options(cfg))
        self.cfg = cfg
        counts_tokens = cfg.token_level_loss and cfg.constant_sample_length is None
        self.loss_type = LossType.TOKEN_LEVEL if counts_tokens else LossType.SEQUENCE_LEVEL
        self.needs_reference = cfg.reference_policy_kl_penalty != 0 and not cfg.use_kl_in_reward
        is_sequence_level = cfg.sequence_level_importance_ratios
        self._ratio: RatioFn = sequence_mean_ratio if is_sequence_level else token_ratio
        self._raw_weight: RatioFn = sequence_product_ratio if is_sequence_level else token_ratio
        self._truncation = make_truncation(
            cfg.truncated_importance_sampling_type,
            cfg.truncated_importance_sampling_ratio_min,
            cfg.truncated_importance_sampling_ratio,
        )
        self._objective = make_objective(
            clip_min=cfg.ratio_clip_min,
            clip_max=cfg.ratio_clip_max,
            clip_c=cfg.ratio_clip_c,
            use_ratio=cfg.force_on_policy_ratio or not cfg.disable_ppo_ratio,
            use_cispo=cfg.use_cispo,
        )
        self._penalties = _make_penalties(cfg, self.needs_reference)
        self.loss_terms = ("loss", "kl_penalty", *self._penalties)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Loss and metrics of one microbatch.

        Args:
            next_token_logprobs: `[B, T-1]`, log-probabilities of tokens 1..T-1 under the policy.
            data: `advantages`, `generation_logprobs`, `token_mask` `[B, T]`, `sample_mask [B]`;
                `prev_logprobs [B, T]` unless the update is on-policy; `reference_policy_logprobs
                [B, T]` if `needs_reference`.
            global_valid_seqs: `sum(sample_mask)` over the global batch.
            global_valid_toks: Tokens that count in the global batch.

        Returns:
            Scalar loss and metrics (see `docs/guides/grpo.md` for their meaning).
        """
        batch = make_policy_batch(
            next_token_logprobs,
            data,
            on_policy=self.cfg.force_on_policy_ratio,
            use_reference=self.needs_reference,
        )
        ratio_BT = self._ratio(batch.logprobs_BT - batch.prev_logprobs_BT, batch.mask_BT)
        weights = self._importance_weights(batch)
        surrogate_BT = weights.weights_BT * self._objective(batch.logprobs_BT, ratio_BT, batch.advantages_BT)

        def reduce(loss_BT: Tensor) -> Tensor:
            if self.loss_type is LossType.TOKEN_LEVEL:
                return masked_mean(loss_BT, batch.mask_BT, None, global_valid_toks)
            return sequence_mean(loss_BT, batch, global_valid_seqs, self.cfg.constant_sample_length)

        loss = reduce(surrogate_BT)
        metrics: LossMetrics = {"kl_penalty": loss.new_zeros(())}
        for name, (coefficient, term) in self._penalties.items():
            penalty = reduce(term(batch))
            loss = loss + coefficient * penalty
            metrics[name] = penalty.detach()
        metrics |= {"loss": loss.detach(), "num_valid_samples": batch.sample_mask_B.sum()}
        metrics |= self._ratio_metrics(batch, ratio_BT.detach(), global_valid_toks)
        metrics |= self._weight_metrics(batch, weights, global_valid_seqs, global_valid_toks)
        metrics |= mismatch_metrics(batch, global_valid_toks)
        return loss, metrics

    def _log_weight(self, batch: PolicyBatch) -> Tensor:
        return batch.prev_logprobs_BT - batch.generation_logprobs_BT

    def _importance_weights(self, batch: PolicyBatch) -> ImportanceWeights:
        """Weights `p_prev / p_engine`, truncated as configured; all 1 without correction."""
        log_weight_BT = self._log_weight(batch)
        if not self.cfg.use_importance_sampling_correction:
            zeros_BT = log_weight_BT.new_zeros(log_weight_BT.shape)
            return ImportanceWeights(zeros_BT + 1, zeros_BT)
        raw_BT = self._raw_weight(log_weight_BT, batch.mask_BT)
        return self._truncation(raw_BT, log_weight_BT, batch.mask_BT)

    def _ratio_metrics(self, batch: PolicyBatch, ratio_BT: Tensor, global_valid_toks: Tensor | float) -> LossMetrics:
        clipped_BT = clip_ratio(ratio_BT, self.cfg.ratio_clip_min, self.cfg.ratio_clip_max)

        def mean(values_BT: Tensor) -> Tensor:
            return masked_mean(values_BT, batch.mask_BT, None, global_valid_toks)

        return {
            "probs_ratio": mean(ratio_BT),
            "probs_ratio_min": masked_min(ratio_BT, batch.mask_BT),
            "probs_ratio_max": masked_max(ratio_BT, batch.mask_BT),
            "probs_ratio_clamped": mean(clipped_BT),
            "probs_ratio_clamped_min": masked_min(clipped_BT, batch.mask_BT),
            "probs_ratio_clamped_max": masked_max(clipped_BT, batch.mask_BT),
            "num_filtered_tokens": batch.num_filtered_tokens,
        }

    def _weight_metrics(
        self,
        batch: PolicyBatch,
        weights: ImportanceWeights,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> LossMetrics:
        """Means over tokens, or over sequences of what is one value for a sequence."""
        raw_weight_BT = self._raw_weight(self._log_weight(batch), batch.mask_BT)
        is_sequence_weight = self.cfg.sequence_level_importance_ratios
        is_sequence_bound = is_sequence_weight or self.cfg.truncated_importance_sampling_type == "seq-mask-tis"

        def mean(values_BT: Tensor, per_sequence: bool) -> Tensor:
            if per_sequence:
                return sequence_mean(values_BT, batch, global_valid_seqs)
            return masked_mean(values_BT, batch.mask_BT, None, global_valid_toks)

        return {
            "sampling_importance_ratio": mean(raw_weight_BT, is_sequence_weight),
            "is_oob_ratio": mean(weights.is_out_of_bounds_BT, is_sequence_bound),
        }


def sequence_mean(
    loss_BT: Tensor, batch: PolicyBatch, global_valid_seqs: Tensor | float, sample_length: float | None = None
) -> Tensor:
    """`sum_b sample_mask_b * (sum over the sample's tokens / its length) / global_valid_seqs`.

    Args:
        loss_BT: A value per token.
        batch: Masks and lengths.
        global_valid_seqs: `sum(sample_mask)` over the global batch.
        sample_length: Tokens that each sample counts as; None for its own number.
    """
    length_B = batch.num_tokens_B if sample_length is None else sample_length
    per_sample_B = safe_divide(masked_sum(loss_BT, batch.mask_BT, dim=-1), length_B)
    return safe_divide(per_sample_B.sum(), global_valid_seqs)


def _make_penalties(cfg: ClippedPGLossConfig, needs_reference: bool) -> dict[str, tuple[float, TermFn]]:
    """The terms beside the surrogate: metric name -> (coefficient, per-token term)."""
    if not needs_reference:
        return {}
    return {"kl_penalty": (cfg.reference_policy_kl_penalty, partial(kl_to_reference, cfg=cfg))}


def kl_to_reference(batch: PolicyBatch, *, cfg: ClippedPGLossConfig) -> Tensor:
    """Weighted KL estimate per token; the weight's gradient is the score-function part, see `kl`.

    The weight is `p_now / p_engine` with `use_on_policy_kl_approximation`, else `p_now / stop(p_now)`, which is 1; of
    the token, or the sequence's geometric mean with `sequence_level_kl_weight`.
    """
    assert batch.reference_logprobs_BT is not None
    sampled_by_BT = batch.generation_logprobs_BT if cfg.use_on_policy_kl_approximation else batch.logprobs_BT.detach()
    weight = sequence_mean_ratio if cfg.sequence_level_kl_weight else token_ratio
    return calculate_kl(
        batch.logprobs_BT,
        batch.reference_logprobs_BT,
        cfg.reference_policy_kl_type,
        cfg.kl_input_clamp_value,
        cfg.kl_output_clamp_value,
        weight(batch.logprobs_BT - sampled_by_BT, batch.mask_BT),
    )
