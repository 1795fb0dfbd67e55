"""Keys of `sft`: supervised fine-tuning.

The format of a conversation is set in `data`.
"""

from nemo_rl.config.schema.algorithms.supervised import SupervisedConfig


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: steps, epochs and validation."""

    only_unmask_final: bool = False
    """Train on the last assistant turn of a conversation only, not on all of them."""
