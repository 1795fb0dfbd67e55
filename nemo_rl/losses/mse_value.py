"""The squared error of a critic, with limited steps.

Invariant: a value outside of the mask influences neither loss nor gradient.

Legend: `B` samples, `T` predicted positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import MseValueLossConfig
from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_max, masked_mean, masked_min


class MseValueLossFn:
    """The mean over tokens of the squared difference between values and returns.

    With the value V, the one before the updates of the step V_old, and the return R of a token:

        scale * 1/2 * max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2)

    Without `cliprange` it is `scale * 1/2 * (V - R)^2`. The larger of the two squares keeps the gradient of a value
    that has moved away from its return; one that has moved towards it by more than `cliprange` has no gradient.

    Args:
        cfg: the section `value_loss_fn`; a dict is checked and filled in.

    Raises:
        ConfigError: a value is out of range.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    needs_reference = False
    rows_per_unit = 1

    def __init__(self, cfg: MseValueLossConfig | Mapping[str, Any]) -> None:
        self.cfg = MseValueLossConfig.of(cfg)

    def __call__(
        self,
        values: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            values: `[B, T-1]`, values of the states before tokens 1..T-1.
            data: `values`, those before the updates of the step, `returns` and `token_mask` `[B, T]`, and
                `sample_mask [B]`.
            global_valid_seqs: Unused; part of the call of every loss.
            global_valid_toks: Tokens that count in the global batch.

        Returns:
            Scalar loss; `loss`, `vf_clipfrac` (share of the tokens without a gradient because of the limit),
            `values_mean`, `values_min` and `values_max` of the current values, `num_valid_samples`.
        """
        mask_B = data["sample_mask"].to(values.dtype)
        mask_BT = data["token_mask"][:, 1:].to(values.dtype) * mask_B[:, None]
        values_BT, returns_BT, old_BT = (
            torch.where(mask_BT != 0, each_BT, 0.0)
            for each_BT in (values, _shifted(data["returns"], values), _shifted(data["values"], values))
        )
        error_BT = (values_BT - returns_BT).square()
        worst_BT = error_BT
        if self.cfg.cliprange is not None:
            # Bounds of the value, not of its change: a value within them stays as it is, bit for bit.
            limited_BT = values_BT.clamp(old_BT - self.cfg.cliprange, old_BT + self.cfg.cliprange)
            worst_BT = torch.maximum(error_BT, (limited_BT - returns_BT).square())

        def mean(each_BT: Tensor) -> Tensor:
            return masked_mean(each_BT, mask_BT, None, global_valid_toks)

        loss = self.cfg.scale * 0.5 * mean(worst_BT)
        current_BT = values_BT.detach()
        return loss, {
            "loss": loss.detach(),
            "vf_clipfrac": mean((worst_BT > error_BT).to(values.dtype)),
            "values_mean": mean(current_BT),
            "values_min": masked_min(current_BT, mask_BT),
            "values_max": masked_max(current_BT, mask_BT),
            "num_valid_samples": mask_B.sum(),
        }


def _shifted(each_BT: Tensor, like: Tensor) -> Tensor:
    """Return the entries of tokens 1..T-1, in the number format of the values."""
    return each_BT[:, 1:].to(like.dtype)
