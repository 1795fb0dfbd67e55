"""Define losses of reward models that learn numbers: scores of answers by attribute, and labels of an answer's steps.

`RegressionLossFn` is the squared error of the scores of HelpSteer (arXiv 2311.09528) and HelpSteer2 (arXiv 2406.08673),
for which a head has an output for each attribute. Rows may lack scores.

`StepLossFn` is the binary cross-entropy of process reward models: Math-Shepherd (arXiv 2312.08935), equation 2, with
r = sigmoid(score after the last token of a step) and the label y of the step:

    -(y log r + (1 - y) log(1 - r))

Invariants: each attribute's error is averaged over the rows of the global batch that have its score, and each step of
the global batch counts once. The losses do not depend on how the batch was divided.

Legend: `B` rows, `N` attributes, `T` tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_sum, safe_divide


class RegressionLossFn:
    """Mean squared error of scores, as a weighted mean over attributes.

    Args:
        weights: Weight of each attribute, in the order of the head's outputs. Their sum is positive.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    needs_reference = False
    rows_per_unit = 1

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def __call__(
        self,
        logits: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float | None = None,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute `sum_n weight_n MSE_n / sum_n weight_n`, where MSE_n is 0 if no row of the batch has score n.

        Args:
            logits: Scores `[B, N]`, or `[B, 1, N]`.
            data: Holds `sample_mask [B]`, `target_scores [B, N]`, `score_mask [B, N]` (1 where a row has the score),
                and `score_counts [B, N]`, the numbers of scores that count, the same in every row of the global batch.
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Unused. Every loss has this argument.

        Returns:
            Scalar loss, and `loss`, `mse_<attribute>`, `mae_<attribute>` and `num_valid_samples`.
        """
        scores_BN = logits.reshape(logits.shape[0], -1)
        sample_mask_B, mask_BN, targets_BN, counts_BN = (
            data[name].to(scores_BN.dtype) for name in ("sample_mask", "score_mask", "target_scores", "score_counts")
        )
        mask_BN = mask_BN * sample_mask_B[:, None]
        error_BN = torch.where(mask_BN != 0, scores_BN - torch.where(mask_BN != 0, targets_BN, 0.0), 0.0)
        mse_N = safe_divide(masked_sum(error_BN.square(), mask_BN, dim=0), counts_BN[0])
        mae_N = safe_divide(masked_sum(error_BN.detach().abs(), mask_BN, dim=0), counts_BN[0])
        weights_N = torch.tensor(list(self.weights.values()), dtype=mse_N.dtype, device=mse_N.device)
        loss = (weights_N * mse_N).sum() / weights_N.sum()
        metrics: LossMetrics = {"loss": loss.detach(), "num_valid_samples": sample_mask_B.sum()}
        for index, name in enumerate(self.weights):
            metrics[f"mse_{name}"], metrics[f"mae_{name}"] = mse_N[index].detach(), mae_N[index]
        return loss, metrics


class StepLossFn:
    """Mean binary cross-entropy of the labels of all steps of the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    needs_reference = False
    rows_per_unit = 1

    def __call__(
        self,
        values: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            values: `[B, T-1]`. Entry t-1 is the score after token t-1.
            data: Holds `sample_mask [B]`, `token_mask [B, T]`, 1 on each token that follows the last token of a step,
                and `step_labels [B, T]`, 1 on those of them that follow a right step.
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Number of steps that count in the global batch.

        Returns:
            Scalar loss, and `loss`, `accuracy` (share of steps whose score has the sign of the label),
            `share_predicted_right`, `num_steps` and `num_valid_samples`.
        """
        sample_mask_B = data["sample_mask"].to(values.dtype)
        mask_BT = data["token_mask"][:, 1:].to(values.dtype) * sample_mask_B[:, None]
        values_BT = torch.where(mask_BT != 0, values, 0.0)
        labels_BT = torch.where(mask_BT != 0, data["step_labels"][:, 1:].to(values.dtype), 0.0)
        loss_BT = binary_cross_entropy_with_logits(values_BT, labels_BT, reduction="none")

        def mean(each_BT: Tensor) -> Tensor:
            return safe_divide(masked_sum(each_BT.to(values.dtype), mask_BT), global_valid_toks)

        loss = mean(loss_BT)
        is_right_BT = values_BT.detach() > 0
        return loss, {
            "loss": loss.detach(),
            "accuracy": mean(is_right_BT == (labels_BT > 0)),
            "share_predicted_right": mean(is_right_BT),
            "num_steps": mask_BT.sum(),
            "num_valid_samples": sample_mask_B.sum(),
        }
