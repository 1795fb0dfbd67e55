"""Convert rows of text to batches of prompts: tokenizers, message logs, processors, data sets, packing.

Invariant: this package makes the token ids of a prompt once, and the prompt is never tokenised again.
"""

from nemo_rl.config import DataConfig

__all__ = ["DataConfig"]
