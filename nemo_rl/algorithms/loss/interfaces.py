"""Re-exports of the protocol of losses (see `nemo_rl.losses.loss_function`)."""

from nemo_rl.losses.loss_function import LossFunction, LossInputType, LossType

__all__ = ["LossFunction", "LossInputType", "LossType"]
