"""Copy model folders (safetensors, configuration and tokenizer), optionally in another dtype.

No model is built. Invariant: the copy loads wherever the source does; config.json and the index describe the
files correctly.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl.files.regular_file import read_text
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.huggingface.full_precision import stays_float32_in_files
from nemo_rl.models.huggingface.tensor_files import TensorFiles, write_file
from nemo_rl.utils.errors import CheckpointError

MODEL_FOLDER = "model"
"""Subfolder of a weights folder that loads with `from_pretrained`."""
CONSOLIDATED_FOLDER = "consolidated"
TENSOR_FILES = "*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def copy_model_folder(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the files of a model folder, without its subfolders.

    One tensor is in memory at a time.

    Args:
        source: a folder that `from_pretrained` loads.
        target: created if it does not exist; may be inside `source`.
        dtype: dtype of floating-point weights but for those that stay float32 (`full_precision`); None copies bit for
            bit.
    """
    files = sorted(file for file in source.iterdir() if file.is_file())
    target.mkdir(parents=True, exist_ok=True)
    tensors = {file: TensorFiles([file]) for file in files if file.match(TENSOR_FILES)}
    stays = stays_float32_in_files(_architecture(source), dtype)
    written, total = 0, sum(len(list(held)) for held in tensors.values())
    with StillWaiting(f"the writing of {target}", "tensors are written", lambda: written, total) as progress:
        for file in files:
            held = tensors.get(file)
            if dtype is None or held is None:
                shutil.copyfile(file, target / file.name)
                written += len(list(held or ()))
                progress.look()
                continue
            for _ in _convert(held, target / file.name, dtype, stays):
                written += 1
                progress.look()
    if dtype is not None:
        _note_dtype(target, dtype)


def require_empty(target: Path) -> None:
    """Check that the target of an export is empty or does not exist.

    Raises:
        CheckpointError: the folder holds files.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{str(target)!r} is not empty. Give a new folder for the exported model.")


def _convert(source: TensorFiles, target: Path, dtype: torch.dtype, stays: Callable[[str], bool]) -> Iterator[None]:
    """Write the tensors of a file in another dtype, but for those that stay as they are; yield after each."""

    def converted(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and not stays(name) else tensor

    likes = {name: converted(name, source.like(name)) for name in source}
    return write_file(target, likes, ((name, converted(name, source.read(name))) for name in source))


def _architecture(folder: Path) -> str | None:
    """Return the name of the class of a model folder, from its config.json."""
    path = folder / "config.json"
    names = json.loads(read_text(path)).get("architectures") if path.exists() else None
    return names[0] if names else None


def _note_dtype(target: Path, dtype: torch.dtype) -> None:
    """Update config.json and the index for converted weights."""
    path = target / "config.json"
    config = json.loads(read_text(path))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(read_text(index))
        content["metadata"] = {"total_size": sum(file.stat().st_size for file in target.glob(TENSOR_FILES))}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
