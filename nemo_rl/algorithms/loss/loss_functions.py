"""Re-export the loss classes of `nemo_rl.losses`."""

from nemo_rl.config import ClippedPGLossConfig, DistillationLossConfig, MseValueLossConfig
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, KTOLossConfig, KTOLossFn, PreferenceLossFn
from nemo_rl.losses.supervised import DistillationLossFn, MseValueLossFn, NLLLossFn

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
