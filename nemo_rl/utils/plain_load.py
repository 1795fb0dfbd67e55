"""Read files of `torch.save` that hold tensors and plain values, without executing anything they contain."""

import pickle
from pathlib import Path
from typing import Any

import torch

from nemo_rl.utils.errors import CheckpointError


def load_plain(path: Path) -> Any:
    """What `torch.save` wrote: tensors, numbers, texts, and lists and dicts of them.

    Raises:
        CheckpointError: the file is missing, damaged, or would execute code.
    """
    try:
        return torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or no file of this library "
            f"({type(error).__name__}: {reason[0] if reason else 'empty'})."
        ) from error
