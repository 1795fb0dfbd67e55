"""Losses on pairs of answers: reward models and direct preference optimisation.

Rows are interleaved: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one. Invariant: a pair counts only
if both of its rows count (in NeMo RL the chosen row decides), and the number of pairs in the global batch is
`global_valid_seqs / 2`.

Legend: `B` = 2P rows, `P` pairs here, `T` predicted positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.pair_losses import PairLossFn, logistic_pair_loss, make_variant
from nemo_rl.losses.reductions import masked_sum, safe_divide
from nemo_rl.utils.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    """Options of `DPOLossFn`; the section `dpo` has the same names."""

    reference_policy_kl_penalty: float
    """Beta, the factor between log-ratio and reward."""
    preference_loss_weight: float
    sft_loss_weight: float
    """Weight of the negative log-likelihood of chosen answers."""
    preference_average_log_probs: bool
    """Divide a row's log-ratio by its number of tokens."""
    sft_average_log_probs: bool
    """Divide a row's log-likelihood by its number of tokens."""
    preference_loss: str = "sigmoid"
    """Name of the variant, a key of `pair_losses.VARIANTS`."""
    label_smoothing: float = 0.0
    """Share of pairs labelled the wrong way round (sigmoid and robust)."""
    target_margin: float = 0.5
    """Gamma of SimPO."""


class PreferenceLossFn:
    """Bradley-Terry loss on scores: reward-model training."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    needs_reference = False
    rows_per_unit = 2

    def __init__(self, pair_loss: PairLossFn = logistic_pair_loss) -> None:
        self._pair_loss = pair_loss

    def __call__(
        self,
        logits: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float | None = None,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the mean pair loss over the valid pairs of the global batch.

        Args:
            logits: Scores `[2P]` or `[2P, 1]`, chosen and rejected interleaved.
            data: Holds `sample_mask [2P]`, and may hold `margin [2P]`: the lead that a pair's chosen answer should
                have, in both of its rows.
            global_valid_seqs: Valid rows in the global batch, twice the number of pairs.
            global_valid_toks: Unused; part of the call of every loss.

        Returns:
            Scalar loss, and `loss`, `accuracy`, `rewards_chosen_mean`, `rewards_rejected_mean`,
            `rewards_margin_mean`, `num_valid_samples` (pairs).

        Raises:
            DataError: The number of rows is odd.
        """
        scores_B = logits.squeeze(-1) if logits.ndim == 2 else logits
        mask_P = pair_mask(data["sample_mask"].to(scores_B.dtype))
        loss = self._mean_pair_loss(scores_B, mask_P, data.get("margin"), global_valid_seqs)
        return loss, {"loss": loss.detach()} | reward_metrics(scores_B, mask_P, global_valid_seqs)

    def _mean_pair_loss(
        self, rewards_B: Tensor, mask_P: Tensor, margin_B: Tensor | None, global_valid_seqs: Tensor | float
    ) -> Tensor:
        chosen_P, rejected_P = split_pairs(rewards_B)
        # Half of the margin on either side keeps the sum of the two rewards, which a pair loss may use.
        handicap_P = 0.0 if margin_B is None else margin_B[0::2].to(rewards_B.dtype) / 2
        loss_P = self._pair_loss(chosen_P - handicap_P, rejected_P + handicap_P)
        return mean_over_pairs(loss_P, mask_P, global_valid_seqs)


def reward_metrics(rewards_B: Tensor, mask_P: Tensor, global_valid_seqs: Tensor | float) -> LossMetrics:
    """Compare chosen with rejected answers: means over the valid pairs of the global batch."""
    chosen_P, rejected_P = split_pairs(rewards_B.detach())

    def mean(values_P: Tensor) -> Tensor:
        return mean_over_pairs(values_P, mask_P, global_valid_seqs)

    return {
        "accuracy": mean((chosen_P > rejected_P).to(rewards_B.dtype)),
        "rewards_chosen_mean": mean(chosen_P),
        "rewards_rejected_mean": mean(rejected_P),
        "rewards_margin_mean": mean(chosen_P - rejected_P),
        "num_valid_samples": mask_P.sum(),
    }


class DPOLossFn(PreferenceLossFn):
    """Direct preference optimisation, arXiv 2305.18290, equation 7, its variants, and an optional NLL term.

    reward = beta * sum_t (log p - log p_reference);
    loss = w_pref * pair_loss(reward_chosen, reward_rejected) + w_sft * NLL(chosen).
    Where the policy equals the reference the sigmoid loss is ln 2. A variant may average over tokens and
    leave the reference out, see `pair_losses`.

    Args:
        cfg: Weights, beta and the name of the variant.
        pair_loss: Loss of a pair from its two rewards, instead of the variant's own.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: DPOLossConfig, pair_loss: PairLossFn | None = None) -> None:
        self.cfg = cfg
        self.variant = make_variant(
            cfg.preference_loss, cfg.reference_policy_kl_penalty, cfg.label_smoothing, cfg.target_margin
        )
        self.needs_reference = self.variant.needs_reference
        super().__init__(pair_loss or self.variant.pair_loss)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float | None = None,
    ) -> tuple[Tensor, LossMetrics]:
        """Weighted sum of preference loss and NLL of the chosen answers, per valid pair.

        Args:
            next_token_logprobs: `[2P, T-1]`, log-probabilities of tokens 1..T-1.
            data: `reference_policy_logprobs` (if `needs_reference`; at their tokens' places, in NeMo RL rolled left
                by one), `token_mask` `[2P, T]` and `sample_mask [2P]`; may hold `margin [2P]`, the offset of arXiv
                2402.10571, equation 5.
            global_valid_seqs: Valid rows in the global batch, twice the number of pairs.
            global_valid_toks: Unused; part of the call of every loss.

        Returns:
            Scalar loss; metrics of `PreferenceLossFn`, whose rewards are log-ratios in nats, without beta; `sft_loss`
            (0 without a weight) and `preference_loss`, both before their weights.

        Raises:
            DataError: The number of rows is odd.
        """
        mask_P = pair_mask(data["sample_mask"].to(next_token_logprobs.dtype))
        counts_B1 = (mask_P != 0).repeat_interleave(2)[:, None]
        mask_BT = data["token_mask"][:, 1:].to(next_token_logprobs.dtype) * counts_B1
        log_ratio_BT = next_token_logprobs
        if self.needs_reference:
            log_ratio_BT = next_token_logprobs - data["reference_policy_logprobs"][:, 1:]
        average = self.cfg.preference_average_log_probs or self.variant.average
        log_ratio_B = _per_row(log_ratio_BT, mask_BT, average)
        preference_loss = self._mean_pair_loss(
            self.cfg.reference_policy_kl_penalty * log_ratio_B, mask_P, data.get("margin"), global_valid_seqs
        )
        loss = self.cfg.preference_loss_weight * preference_loss
        sft_loss = loss.new_zeros(())
        if self.cfg.sft_loss_weight != 0:
            average = self.cfg.sft_average_log_probs or self.variant.sft_average
            chosen_P, _ = split_pairs(_per_row(next_token_logprobs, mask_BT, average))
            sft_loss = mean_over_pairs(-chosen_P, mask_P, global_valid_seqs)
            loss = loss + self.cfg.sft_loss_weight * sft_loss
        return loss, reward_metrics(log_ratio_B, mask_P, global_valid_seqs) | {
            "loss": loss.detach(),
            "preference_loss": preference_loss.detach(),
            "sft_loss": sft_loss.detach(),
        }


def split_pairs(rows_B: Tensor) -> tuple[Tensor, Tensor]:
    """Split interleaved rows into chosen (even rows) and rejected (odd rows).

    Raises:
        DataError: The number of rows is odd.
    """
    if rows_B.shape[0] % 2:
        raise DataError(
            f"A preference batch holds chosen and rejected rows in turn, so its number of rows is "
            f"even; got {rows_B.shape[0]}. Use an even micro batch size."
        )
    return rows_B[0::2], rows_B[1::2]


def pair_mask(sample_mask_B: Tensor) -> Tensor:
    """Return the mask `[P]` of pairs; a pair counts if both of its rows count."""
    chosen_P, rejected_P = split_pairs(sample_mask_B)
    return torch.minimum(chosen_P, rejected_P)


def mean_over_pairs(values_P: Tensor, mask_P: Tensor, global_valid_seqs: Tensor | float) -> Tensor:
    """Return `sum(values * mask) / (global_valid_seqs / 2)`."""
    return safe_divide(masked_sum(values_P, mask_P), global_valid_seqs / 2)


def _per_row(values_BT: Tensor, mask_BT: Tensor, average: bool) -> Tensor:
    total_B = masked_sum(values_BT, mask_BT, dim=-1)
    return safe_divide(total_B, mask_BT.sum(-1)) if average else total_B
