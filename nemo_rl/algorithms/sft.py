"""Supervised fine-tuning: next-token likelihood of the assistant's turns.

The loop is `supervised.supervised_train`; here is what makes it SFT. Invariant: only what an assistant wrote counts,
each token once.
"""

from nemo_rl.algorithms.supervised.loop import SupervisedRun, supervised_train
from nemo_rl.config import SFTConfig
from nemo_rl.config import SFTMasterConfig as MasterConfig

__all__ = ["VALIDATION_NAMES", "MasterConfig", "SFTConfig", "sft_train"]

VALIDATION_NAMES = (("loss", "val_loss"), ("num_valid_samples", "num_valid_samples"))
"""Metrics of the loss that a validation reports, and their names there."""


def sft_train(run: SupervisedRun) -> None:
    """Train; see `supervised.supervised_train`."""
    supervised_train(run)
