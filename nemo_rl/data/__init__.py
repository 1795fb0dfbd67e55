"""Turns rows of text into batches of prompts: tokenizers, message logs, processors, data sets, packing.

Invariant: token ids of a prompt are made once, here, and never re-tokenised.
"""

from nemo_rl.config import DataConfig

__all__ = ["DataConfig"]
