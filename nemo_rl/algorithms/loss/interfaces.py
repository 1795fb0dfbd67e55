"""Re-export the protocol of losses from `nemo_rl.losses.loss_function`."""

from nemo_rl.losses.loss_function import LossFunction, LossInputType, LossType

__all__ = ["LossFunction", "LossInputType", "LossType"]
