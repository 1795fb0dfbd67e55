"""Define the policy-gradient loss of GRPO, PPO, DAPO, GSPO, CISPO and REINFORCE with their corrections.

The loss is composed of functions of `objectives` and `divergence`. Invariant: options choose functions at construction.
`__call__` is the same code for all options.

    loss = reduce(w * objective(log p, ratio, A)) + beta * reduce(KL to the reference)
        + mu * reduce(-log p on answers with a positive reward)

`reduce` sums over tokens and divides the sum by the global token count, by a constant for each sample (Dr.GRPO), or by
each sample's own length. In the last two cases it also divides by the global sample count. The KL term has the full
gradient of the divergence, including the score-function part (`divergence`).

Legend: `B` samples, `T` predicted positions.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from nemo_rl.config import ClippedPGLossConfig, check_loss_options, report_findings
from nemo_rl.losses.divergence import (
    after_mask,
    calculate_kl,
    mismatch_metrics,
    sequence_error_metrics,
    sequence_errors,
)
from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.objectives import (
    ImportanceWeights,
    PolicyBatch,
    RatioFn,
    clip_ratio,
    make_objective,
    make_policy_batch,
    make_truncation,
    sequence_mean_ratio,
    sequence_product_weight,
    token_ratio,
    token_weight,
)
from nemo_rl.losses.reductions import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    safe_divide,
)

type TermFn = Callable[[PolicyBatch], Tensor]
"""Function of a `PolicyBatch` that returns `loss_BT`."""


class ClippedPGLossFn:
    """Policy-gradient loss with clipping, KL penalty and correction of the mismatch between training and generation.

    Example:
        >>> loss_fn = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_max=0.28))
        >>> loss, metrics = loss_fn(logprobs, data, global_valid_seqs=64, global_valid_toks=4096)
    """

    input_type = LossInputType.LOGPROB
    rows_per_unit = 1

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, Any]) -> None:
        """Choose ratio, objective, weights, reduction and penalty terms.

        Args:
            cfg: The section `loss_fn`. A dict is checked, and missing values get their defaults.

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
        # # If the ratio is always 1 and advantages differ within a sequence, only a ratio per token gives the policy
        # gradient.
        has_sequence_ratio = is_sequence_level and not cfg.force_on_policy_ratio
        self._ratio: RatioFn = sequence_mean_ratio if has_sequence_ratio else token_ratio
        self._raw_weight: RatioFn = sequence_product_weight if is_sequence_level else token_weight
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
        self.sequence_means = _sequence_means(cfg, self.loss_type, self._penalties)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            next_token_logprobs: `[B, T-1]`, log-probabilities of tokens 1..T-1 under the policy.
            data: Holds `advantages`, `generation_logprobs` and `token_mask` `[B, T]`, and `sample_mask [B]`. It holds
                `prev_logprobs [B, T]` unless the update is on-policy, and `reference_policy_logprobs [B, T]` if
                `needs_reference`. It may hold `positive_examples [B]`, 1 for answers with a positive reward; without
                it, the answers with a positive advantage are used. Without `prev_logprobs` it may hold
                `num_counted_samples [B]`, which in every row is the number of rows of the global batch with a token
                that counts; without it, `global_valid_seqs` is used.
            global_valid_seqs: `sum(sample_mask)` over the global batch.
            global_valid_toks: Number of tokens that count in the global batch.

        Returns:
            Scalar loss and metrics (`docs/algorithms/grpo.md` for their meaning).
        """
        batch = make_policy_batch(
            next_token_logprobs,
            data,
            on_policy=self.cfg.force_on_policy_ratio,
            use_reference=self.needs_reference,
        )
        ratio_BT = self._ratio(batch.logprobs_BT - batch.prev_logprobs_BT, batch.mask_BT)
        weights = self._importance_weights(batch)
        surrogate_BT = self._objective(batch.logprobs_BT, ratio_BT, batch.advantages_BT)
        if self.cfg.use_importance_sampling_correction:
            surrogate_BT = weights.weights_BT * surrogate_BT

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
        metrics |= mismatch_metrics(batch, global_valid_toks, self.cfg.reference_policy_kl_type)
        if "prev_logprobs" not in data:
            metrics |= _sequence_metrics(batch, data.get("num_counted_samples"), global_valid_seqs)
        return loss, metrics

    def _importance_weights(self, batch: PolicyBatch) -> ImportanceWeights:
        """Return the weights `p_prev / p_engine`, truncated as configured."""
        log_weight_BT = batch.prev_logprobs_BT - batch.generation_logprobs_BT
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
        """Return the mean weight after truncation, and the share of weights that were truncated.

        Weights of sequences are averaged over sequences. The share is relative to tokens or, with seq-mask-tis, to
        sequences.
        """

        def mean(values_BT: Tensor, per_sequence: bool) -> Tensor:
            if per_sequence:
                return sequence_mean(values_BT, batch, global_valid_seqs)
            return masked_mean(values_BT, batch.mask_BT, None, global_valid_toks)

        return {
            "sampling_importance_ratio": mean(weights.weights_BT, self.cfg.sequence_level_importance_ratios),
            "is_oob_ratio": mean(
                weights.is_out_of_bounds_BT, self.cfg.truncated_importance_sampling_type == "seq-mask-tis"
            ),
        }


def _sequence_means(cfg: ClippedPGLossConfig, loss_type: LossType, penalties: Iterable[str]) -> frozenset[str]:
    """Return the names of the metrics that are means over sequences."""
    names = {"mean_seq_mult_prob_error", "mean_seq_mult_prob_error_after_mask"}
    if loss_type is LossType.SEQUENCE_LEVEL:
        names |= {"loss", "kl_penalty", *penalties}
    if cfg.sequence_level_importance_ratios:
        names.add("sampling_importance_ratio")
    if cfg.truncated_importance_sampling_type == "seq-mask-tis":
        names.add("is_oob_ratio")
    return frozenset(names)


def _sequence_metrics(
    batch: PolicyBatch, num_counted_B: Tensor | None, global_valid_seqs: Tensor | float
) -> LossMetrics:
    """Return metrics of the sequences' mismatch, for updates without `prev_logprobs` and masked samples."""
    current_BT = batch.prev_logprobs_BT
    errors_B = sequence_errors(current_BT, batch.generation_logprobs_BT, batch.mask_BT)
    num_samples = global_valid_seqs if num_counted_B is None else num_counted_B.max()
    metrics = sequence_error_metrics(errors_B, batch.mask_BT.sum(-1), num_samples)
    return metrics | after_mask(metrics)


def sequence_mean(
    loss_BT: Tensor, batch: PolicyBatch, global_valid_seqs: Tensor | float, sample_length: float | None = None
) -> Tensor:
    """Return `sum_b sample_mask_b * (sum over the row's tokens / its length) / global_valid_seqs`.

    Each row is a sequence: a sample with several conversations counts once for each of them.

    Args:
        loss_BT: A value per token.
        batch: Masks and lengths.
        global_valid_seqs: `sum(sample_mask)` over the global batch.
        sample_length: Length by which each row is divided. If None, its own number of tokens.
    """
    length_B = batch.num_tokens_B if sample_length is None else sample_length
    per_sample_B = safe_divide(masked_sum(loss_BT, batch.mask_BT, dim=-1), length_B)
    return safe_divide(per_sample_B.sum(), global_valid_seqs)


def _make_penalties(cfg: ClippedPGLossConfig, needs_reference: bool) -> dict[str, tuple[float, TermFn]]:
    """Choose the terms that are added to the surrogate: coefficient and per-token term by metric name."""
    penalties: dict[str, tuple[float, TermFn]] = {}
    if needs_reference:
        penalties["kl_penalty"] = (cfg.reference_policy_kl_penalty, partial(kl_to_reference, cfg=cfg))
    if cfg.positive_example_nll_weight != 0:
        penalties["positive_nll_loss"] = (cfg.positive_example_nll_weight, positive_nll)
    return penalties


def positive_nll(batch: PolicyBatch) -> Tensor:
    """`-log p` on answers with a positive reward, 0 on all others: imitation of right answers, VAPO, arXiv 2504.05118.

    The paper divides the sum by the tokens of right answers. Here it has the denominator of the loss.
    """
    return -batch.logprobs_BT * batch.positive_BT


def kl_to_reference(batch: PolicyBatch, *, cfg: ClippedPGLossConfig) -> Tensor:
    """Weighted KL estimate per token. The gradient of the weight is the score-function part (`divergence`).

    With `use_on_policy_kl_approximation`, the weight is `p_now / p_engine`. Otherwise, it is `p_now / stop(p_now)`,
    whose value is 1. With `sequence_level_kl_weight`, the geometric mean over the sequence replaces the token's ratio.
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
