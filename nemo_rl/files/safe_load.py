"""Read files of `torch.save` that hold tensors and plain values, without executing anything they contain."""

import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from nemo_rl.files.regular_file import require_regular
from nemo_rl.utils.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)
"""Plain types. Their subclasses are not plain, because loading them would execute code."""

_DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError),
    *(TypeError, ValueError, struct.error, zipfile.BadZipFile),
)
"""Errors that torch raises for files with changed bytes."""


def is_plain(value: Any) -> bool:
    """Return whether `load_plain` can load a value: tensors, numbers, texts, and lists, tuples and dicts of them."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def load_plain(path: Path) -> Any:
    """Load tensors, numbers, texts, and lists and dicts of them from a file of `torch.save`.

    Raises:
        CheckpointError: the file is missing, damaged, or would execute code.
    """
    try:
        require_regular(path)
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: {refusal(error)}.") from error
    except _DAMAGED as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or was not written by nemo_rl "
            f"({type(error).__name__}: {reason[0] if reason else 'empty'})."
        ) from error


def refusal(error: pickle.UnpicklingError) -> str:
    """Explain why `torch.load` refused a file, since torch's own message advises executing the file's content."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return "it is damaged, or was not written by nemo_rl"
    return (
        f"it names {named[1]}, which loading would execute. Files of this library never do: the file was changed, "
        "so do not use anything in its folder"
    )
