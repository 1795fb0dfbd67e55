"""The loss of Kahneman-Tversky optimisation, on single answers labelled desirable or undesirable.

`algorithms.kto` prepares its batches. Invariant: values that all rows of the global batch share (the baseline, the
number of desirable rows) are constant columns of the batch, so the loss does not depend on how the batch was cut.

Legend: `B` rows, `T` predicted positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_sum, safe_divide


@dataclass(frozen=True, kw_only=True)
class KTOLossConfig:
    """Options of `KTOLossFn`; the section `dpo` has the same names."""

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

    and the mean over all rows that count. Where the policy equals the reference and both weights are 1 the loss
    is 1/2.
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
            data: `reference_policy_logprobs` and `token_mask` `[B, T]`; `sample_mask [B]`; `desirable [B]`, 1 or
                0; and, the same in every row of the global batch, `kl_baseline [B]` (z0) and `num_desirable [B]`
                (desirable rows that count).
            global_valid_seqs: Rows that count in the global batch.
            global_valid_toks: Unused; part of the call of every loss.

        Returns:
            Scalar loss; `loss`, `accuracy` (share of rows on their side of the baseline), `kl_baseline`,
            `rewards_chosen_mean` and `rewards_rejected_mean` (r of desirable and undesirable rows, without beta),
            `rewards_margin_mean` (their difference), `num_valid_samples`.
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
