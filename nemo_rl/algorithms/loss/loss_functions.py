"""Re-exports of the loss classes; see the files of `nemo_rl.losses`."""

from nemo_rl.config import ClippedPGLossConfig, DistillationLossConfig, MseValueLossConfig
from nemo_rl.losses.distillation import DistillationLossFn
from nemo_rl.losses.feedback import KTOLossConfig, KTOLossFn
from nemo_rl.losses.likelihood import NLLLossFn
from nemo_rl.losses.mse_value import MseValueLossFn
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLossFn

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "KTOLossConfig",
    "KTOLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
]
