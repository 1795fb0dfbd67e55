"""Turns rows of text into batches of prompts: tokenizers, message logs, processors, data sets, packing.

Invariant: the token ids of a prompt are made once, in this package, and the prompt is never tokenised again.
"""

from nemo_rl.config import DataConfig

__all__ = ["DataConfig"]
