"""Re-exports of the protocol of losses; see `nemo_rl.losses.interfaces`."""

from nemo_rl.losses.interfaces import LossFunction, LossInputType, LossType

__all__ = ["LossFunction", "LossInputType", "LossType"]
