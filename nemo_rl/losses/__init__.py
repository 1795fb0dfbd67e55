"""Define the losses, which are pure functions of tensors without process groups and raw config dicts.

Invariant: a loss divides by the denominators of the global batch, so the sum over microbatches and ranks is the loss of
the whole batch.
"""

from nemo_rl.losses.loss_function import LossFunction, LossInputType, LossType
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLossFn
from nemo_rl.losses.supervised import DistillationLossFn, MseValueLossFn, NLLLossFn

__all__ = [
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
]
