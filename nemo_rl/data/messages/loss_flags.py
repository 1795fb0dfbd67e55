"""Reads the flags with which rows exclude turns from the loss."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.utils.errors import DataError

LOSS_FLAGS = ("weight", "loss", "train", "training", "trainable", "train_on_turn")
"""Keys of a message that say whether it counts in the loss: `weight` is OpenAI's, the others are of other libraries."""


def is_excluded(message: Mapping[str, Any]) -> bool:
    """Return whether a message says that it does not count in the loss.

    Raises:
        DataError: A flag is neither 0 or 1 nor true or false.
    """
    flags = {key: message[key] for key in LOSS_FLAGS if message.get(key) is not None}
    odd = next(((key, value) for key, value in flags.items() if value not in (0, 1)), None)
    if odd is not None:
        raise DataError(
            f"{odd[0]!r} of a message is {odd[1]!r}; a message counts in the loss as a whole (1, true) or not at all "
            "(0, false)"
        )
    return any(not value for value in flags.values())
