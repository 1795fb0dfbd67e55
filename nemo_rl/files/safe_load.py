"""Read files of `torch.save` that hold tensors and plain values, without executing anything they contain."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from nemo_rl.utils.errors import CheckpointError


def load_plain(path: Path) -> Any:
    """What `torch.save` wrote: tensors, numbers, texts, and lists and dicts of them.

    Raises:
        CheckpointError: the file is missing, damaged, or would execute code.
    """
    if path.exists() and not path.is_file():  # reading a named pipe would wait for ever
        raise CheckpointError(f"{path} cannot be read: it is no file.")
    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: {refusal(error)}.") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or no file of this library "
            f"({type(error).__name__}: {reason[0] if reason else 'empty'})."
        ) from error


def refusal(error: pickle.UnpicklingError) -> str:
    """Why `torch.load` read nothing; its own text advises to execute what is in the file."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return "it is damaged, or no file of this library"
    return (
        f"it names {named[1]}, which loading it would execute. No file of this library does: somebody changed it, and "
        "nothing of its folder should be used"
    )
