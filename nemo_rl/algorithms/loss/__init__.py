"""Re-export the losses of `nemo_rl.losses` under the import path of NeMo RL."""

from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType
from nemo_rl.algorithms.loss.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    DistillationLossConfig,
    DistillationLossFn,
    DPOLossConfig,
    DPOLossFn,
    KTOLossConfig,
    KTOLossFn,
    MseValueLossConfig,
    MseValueLossFn,
    NLLLossFn,
    PreferenceLossFn,
)

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "KTOLossConfig",
    "KTOLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
]
