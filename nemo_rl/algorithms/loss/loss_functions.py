"""Door to the loss classes; see the files of `nemo_rl.losses`."""

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.likelihood import NLLLossFn
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLossFn

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
]
