"""Decode sampled tokens, in the same way in the engine that sampled them and in the reader of its result."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampled_text(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int] | NDArray[np.int32]) -> str:
    """Decode a response without special tokens such as the one that ends a turn."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str), "one sequence gives one text"
    return text
