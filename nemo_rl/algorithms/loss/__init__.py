"""Re-exports of the losses in `nemo_rl.losses`, under the name users import."""

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
