"""Copy model folders (safetensors, configuration and tokenizer), optionally in another dtype.

No model code is needed. Invariant: the copy loads wherever the source does; config.json and the index describe the
files correctly.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_rl.utils.errors import CheckpointError

MODEL_FOLDER = "model"
"""Subfolder of a weights folder that loads with `from_pretrained`."""
CONSOLIDATED_FOLDER = "consolidated"
TENSOR_FILES = "*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def copy_model_folder(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the files of a model folder, without its subfolders.

    One file is in memory at a time.

    Args:
        source: a folder that `from_pretrained` loads.
        target: created if it does not exist; may be inside `source`.
        dtype: dtype of floating-point weights; None copies bit for bit.
    """
    files = sorted(file for file in source.iterdir() if file.is_file())
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        if dtype is not None and file.match(TENSOR_FILES):
            _convert(file, target / file.name, dtype)
        else:
            shutil.copyfile(file, target / file.name)
    if dtype is not None:
        _note_dtype(target, dtype)


def require_empty(target: Path) -> None:
    """Check that the target of an export is empty or does not exist.

    Raises:
        CheckpointError: the folder holds files.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{str(target)!r} is not empty. Give a new folder for the exported model.")


def _convert(source: Path, target: Path, dtype: torch.dtype) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    converted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(converted, target, metadata={"format": "pt"})


def _note_dtype(target: Path, dtype: torch.dtype) -> None:
    """Update config.json and the index for converted weights."""
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["metadata"] = {"total_size": sum(file.stat().st_size for file in target.glob(TENSOR_FILES))}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
