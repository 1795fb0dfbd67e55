"""Define losses of preferences: of pairs of answers (reward models, DPO) and of single labelled answers (KTO).

Rows of pairs are interleaved: row 2i is the chosen answer of pair i, and row 2i + 1 is the rejected answer. The loss of
a pair is computed from the rewards of its two answers, and then averaged over the batch. A variant of DPO is an entry
of `VARIANTS`: a function of two rewards, and whether rewards are averages over tokens and relative to a reference. KTO
learns from single answers that are labelled desirable or undesirable. `algorithms.kto` prepares its batches.

Invariants: a pair counts only if both of its rows count (in NeMo RL the chosen row decides), and the number of pairs in
the global batch is `global_valid_seqs / 2`. Each pair loss is the formula of its paper, with m = reward_chosen -
reward_rejected and with rewards that are already multiplied by beta. In KTO, values that all rows of the global batch
share (the baseline, the number of desirable rows) are constant columns of the batch, so the loss does not depend on how
the batch was divided.

Legend: `P` pairs, `B` rows (2P for pairs), `T` predicted positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_sum, safe_divide
from nemo_rl.utils.errors import ConfigError, DataError

type PairLossFn = Callable[[Tensor, Tensor], Tensor]
"""Function of the rewards `chosen_P` and `rejected_P` that returns `loss_P`."""


def logistic_pair_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return `-log sigmoid(chosen - rejected)`: the negative log-likelihood of the Bradley-Terry model."""
    return -logsigmoid(chosen_P - rejected_P)


def smoothed_logistic_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, e: float) -> Tensor:
    """`-(1 - e) log sigmoid(m) - e log sigmoid(-m)`: conservative DPO, for labels wrong with probability e.

    Mitchell, "A note on DPO with noisy preferences and relationship to IPO" (2023), equation 3.
    """
    margin_P = chosen_P - rejected_P
    return -(1 - e) * logsigmoid(margin_P) - e * logsigmoid(-margin_P)


def robust_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, e: float) -> Tensor:
    """Return `(-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2e)`: unbiased under noise, arXiv 2403.00409."""
    margin_P = chosen_P - rejected_P
    return (-(1 - e) * logsigmoid(margin_P) + e * logsigmoid(-margin_P)) / (1 - 2 * e)


def ipo_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """Return `(m / beta - 1 / (2 beta))^2` on mean log-ratios, arXiv 2310.12036, equation 17."""
    return ((chosen_P - rejected_P) / beta - 1 / (2 * beta)) ** 2


def hinge_pair_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return `max(0, 1 - m)`: SLiC, arXiv 2305.10425, on DPO's rewards."""
    return torch.relu(1 - (chosen_P - rejected_P))


def margin_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin: float) -> Tensor:
    """Return `-log sigmoid(m - margin)`: SimPO (arXiv 2405.14734, equation 6) and reward models with a margin."""
    return -logsigmoid(chosen_P - rejected_P - margin)


def odds_ratio_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """Return `-beta log sigmoid(log odds_chosen - log odds_rejected)`: ORPO, arXiv 2403.07691, equation 7.

    odds = p / (1 - p), where p is the geometric mean of the answer's token probabilities. Rewards are beta log p.
    """
    return -beta * logsigmoid(_log_odds(chosen_P / beta) - _log_odds(rejected_P / beta))


def _log_odds(logprob_P: Tensor) -> Tensor:
    # # A row without tokens has the probability 1, whose odds are infinite. Its loss must stay finite.
    logprob_P = logprob_P.clamp(max=-1e-7)
    return logprob_P - torch.log(-torch.expm1(logprob_P))


@dataclass(frozen=True)
class CentredMargin:
    """`-log sigmoid(m - margin) + c (chosen + rejected)^2`: a reward model with scores around 0.

    The margin is that of Llama 2 (arXiv 2307.09288, equation 2), the centring that of arXiv 2312.09244, section 3.
    """

    margin: float
    coefficient: float

    def __call__(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss of each pair."""
        loss_P = margin_pair_loss(chosen_P, rejected_P, margin=self.margin)
        return loss_P + self.coefficient * (chosen_P + rejected_P) ** 2


@dataclass(frozen=True)
class Variant:
    """One preference loss."""

    pair_loss: PairLossFn
    """Function that returns the loss of a pair from its rewards."""
    average: bool = False
    """Whether rewards are always means over tokens, independent of the configuration."""
    needs_reference: bool = True
    """Whether rewards are relative to the reference policy."""
    sft_average: bool = False
    """Whether the likelihood term is always a mean over tokens, independent of the configuration."""


type VariantFactory = Callable[[float, float, float], Variant]
"""Function of beta, label smoothing e and target margin that returns a variant."""

VARIANTS: dict[str, VariantFactory] = {
    "sigmoid": lambda beta, e, margin: Variant(partial(smoothed_logistic_pair_loss, e=e)),
    "robust": lambda beta, e, margin: Variant(partial(robust_pair_loss, e=e)),
    "rpo": lambda beta, e, margin: Variant(partial(smoothed_logistic_pair_loss, e=e), sft_average=True),
    "hinge": lambda beta, e, margin: Variant(hinge_pair_loss),
    "ipo": lambda beta, e, margin: Variant(partial(ipo_pair_loss, beta=beta), average=True),
    "simpo": lambda beta, e, margin: Variant(
        partial(margin_pair_loss, margin=margin), average=True, needs_reference=False
    ),
    "orpo": lambda beta, e, margin: Variant(
        partial(odds_ratio_pair_loss, beta=beta), average=True, needs_reference=False, sft_average=True
    ),
}


def make_variant(name: str, beta: float, label_smoothing: float, target_margin: float) -> Variant:
    """Build the preference loss of the given name.

    Raises:
        ConfigError: no loss has this name.
    """
    if name not in VARIANTS:
        raise ConfigError(f"dpo.preference_loss={name!r} is unknown; choose one of {', '.join(VARIANTS)}.")
    return VARIANTS[name](beta, label_smoothing, target_margin)


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    """Options of `DPOLossFn`, named as in the section `dpo`."""

    reference_policy_kl_penalty: float
    """Beta, the factor between log-ratio and reward."""
    preference_loss_weight: float
    sft_loss_weight: float
    """Weight of the negative log-likelihood of chosen answers."""
    preference_average_log_probs: bool
    """Whether to divide a row's log-ratio by its number of tokens."""
    sft_average_log_probs: bool
    """Whether to divide a row's log-likelihood by its number of tokens."""
    preference_loss: str = "sigmoid"
    """Name of the variant, a key of `VARIANTS`."""
    label_smoothing: float = 0.0
    """Share of pairs with swapped labels (variants sigmoid and robust)."""
    target_margin: float = 0.5
    """Gamma of SimPO."""


class PreferenceLossFn:
    """Bradley-Terry loss of scores, for training reward models."""

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
            data: Holds `sample_mask [2P]`, and may hold `margin [2P]`, the desired difference of the scores of a pair's
                answers, in both of its rows.
            global_valid_seqs: Valid rows in the global batch, twice the number of pairs.
            global_valid_toks: Unused. Every loss has this argument.

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
        # # The margin is split between both rewards, so that their sum, which a pair loss may use, does not change.
        handicap_P = 0.0 if margin_B is None else margin_B[0::2].to(rewards_B.dtype) / 2
        loss_P = self._pair_loss(chosen_P - handicap_P, rejected_P + handicap_P)
        return mean_over_pairs(loss_P, mask_P, global_valid_seqs)


def reward_metrics(rewards_B: Tensor, mask_P: Tensor, global_valid_seqs: Tensor | float) -> LossMetrics:
    """Return mean rewards of chosen and rejected answers over the valid pairs of the global batch."""
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

    reward = beta * sum_t (log p - log p_reference)
    loss = w_pref * pair_loss(reward_chosen, reward_rejected) + w_sft * NLL(chosen)

    With policy = reference, the sigmoid loss is ln 2. `VARIANTS` may average over tokens and leave the reference out.

    Args:
        cfg: Weights, beta and the name of the variant.
        pair_loss: Loss of a pair from its two rewards, used instead of the variant's.
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
        """Compute the weighted sum of preference loss and NLL of the chosen answers, per valid pair.

        Args:
            next_token_logprobs: `[2P, T-1]`, log-probabilities of tokens 1..T-1.
            data: Holds `token_mask [2P, T]`, `sample_mask [2P]` and, if `needs_reference`, `reference_policy_logprobs
                [2P, T]`, where position t belongs to token t (in NeMo RL they are rolled left by one). It may hold
                `margin [2P]`, the offset of arXiv 2402.10571, equation 5.
            global_valid_seqs: Valid rows in the global batch, twice the number of pairs.
            global_valid_toks: Unused. Every loss has this argument.

        Returns:
            Scalar loss, and the metrics of `PreferenceLossFn`, in which rewards are log-ratios in nats, without beta.
            Further metrics are `sft_loss` (0 if its weight is 0) and `preference_loss`, both before they are weighted.

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
    """Return the mask `[P]` of pairs. A pair counts if both rows count."""
    chosen_P, rejected_P = split_pairs(sample_mask_B)
    return torch.minimum(chosen_P, rejected_P)


def mean_over_pairs(values_P: Tensor, mask_P: Tensor, global_valid_seqs: Tensor | float) -> Tensor:
    """Return `sum(values * mask) / (global_valid_seqs / 2)`."""
    return safe_divide(masked_sum(values_P, mask_P), global_valid_seqs / 2)


def _per_row(values_BT: Tensor, mask_BT: Tensor, average: bool) -> Tensor:
    total_B = masked_sum(values_BT, mask_BT, dim=-1)
    return safe_divide(total_B, mask_BT.sum(-1)) if average else total_B


@dataclass(frozen=True, kw_only=True)
class KTOLossConfig:
    """Options of `KTOLossFn`, named as in the section `dpo`."""

    reference_policy_kl_penalty: float
    """Beta, the factor between log-ratio and reward."""
    desirable_weight: float = 1.0
    """lambda_D, weight of desirable answers."""
    undesirable_weight: float = 1.0
    """lambda_U, weight of undesirable answers."""


class KTOLossFn:
    """Kahneman-Tversky optimisation, arXiv 2402.01306, section 4.1, without its constant E[lambda].

    With r = sum_t (log p - log p_reference) of a row and the baseline z0, an estimate of KL(policy || reference):

        desirable:   lambda_D * (1 - sigmoid(beta * (r - z0)))
        undesirable: lambda_U * (1 - sigmoid(beta * (z0 - r)))

    The loss is the mean over all rows that count. If the policy equals the reference and both weights are 1, it is 1/2.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB
    needs_reference = True
    rows_per_unit = 1

    def __init__(self, cfg: KTOLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float | None = None,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the mean loss of the rows that count in the global batch.

        Args:
            next_token_logprobs: `[B, T-1]`, log-probabilities of tokens 1..T-1.
            data: Holds `reference_policy_logprobs` and `token_mask` `[B, T]`, `sample_mask [B]` and `desirable [B]`, 1
                or 0. It also holds `kl_baseline [B]` (z0) and `num_desirable [B]` (the number of desirable rows that
                count), which are the same in every row of the global batch.
            global_valid_seqs: Number of rows that count in the global batch.
            global_valid_toks: Unused. Every loss has this argument.

        Returns:
            Scalar loss, and the metrics `loss`, `accuracy` (share of rows on the right side of the baseline),
            `kl_baseline`, `rewards_chosen_mean` and `rewards_rejected_mean` (mean r of desirable and undesirable rows,
            without beta), `rewards_margin_mean` (their difference) and `num_valid_samples`.
        """
        dtype, beta = next_token_logprobs.dtype, self.cfg.reference_policy_kl_penalty
        mask_B, desirable_B, baseline_B, count_B = (
            data[name].to(dtype) for name in ("sample_mask", "desirable", "kl_baseline", "num_desirable")
        )
        mask_BT = data["token_mask"][:, 1:].to(dtype) * (mask_B != 0)[:, None]
        log_ratio_BT = next_token_logprobs - data["reference_policy_logprobs"][:, 1:].to(dtype)
        log_ratio_B = masked_sum(log_ratio_BT, mask_BT, dim=-1)

        lead_B = (2 * desirable_B - 1) * (log_ratio_B - baseline_B)
        weight_B = self.cfg.desirable_weight * desirable_B + self.cfg.undesirable_weight * (1 - desirable_B)
        loss_B = weight_B * torch.sigmoid(-beta * lead_B)

        def mean(values_B: Tensor) -> Tensor:
            return safe_divide(masked_sum(values_B.detach(), mask_B), global_valid_seqs)

        def mean_of(chosen_B: Tensor, count: Tensor) -> Tensor:
            return safe_divide(masked_sum(log_ratio_B.detach() * chosen_B, mask_B), count)

        loss = safe_divide(masked_sum(loss_B, mask_B), global_valid_seqs)
        num_desirable = count_B.max()
        chosen = mean_of(desirable_B, num_desirable)
        rejected = mean_of(1 - desirable_B, torch.as_tensor(global_valid_seqs, dtype=dtype) - num_desirable)
        return loss, {
            "loss": loss.detach(),
            "accuracy": mean((lead_B > 0).to(dtype)),
            "kl_baseline": mean(baseline_B),
            "rewards_chosen_mean": chosen,
            "rewards_rejected_mean": rejected,
            "rewards_margin_mean": chosen - rejected,
            "num_valid_samples": mask_B.sum(),
        }
