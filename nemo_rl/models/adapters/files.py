"""Write an adapter to a folder that the PEFT library reads, with the state of its optimizer, and read it again.

    F/adapter_config.json, adapter_model.safetensors    `PeftModel.from_pretrained(base, F)`
    F/adapter_shape.json                                seed and groups of layers, which PEFT does not have
    F/optimizer.safetensors                             moments, numbers of updates, gradients since the last update

Invariant: a folder is complete or absent. A read adapter has the bits of the written one, and continues with the same
bits if its optimizer was written too.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from nemo_rl.config import LoraConfig
from nemo_rl.files.regular_file import read_text
from nemo_rl.host.capacity import free_bytes, readable_bytes
from nemo_rl.models.adapters.slots import AdapterSlots
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, LowRankPair, is_of_mlp
from nemo_rl.models.adapters.training import expected_state
from nemo_rl.models.huggingface.folders import (
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    extensions_of,
    peft_config,
    peft_key,
    read_peft_config,
)
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.utils.checkpoint import flush_folder, flush_tree
from nemo_rl.utils.errors import CheckpointError

SHAPE_FILE = "adapter_shape.json"
OPTIMIZER_FILE = "optimizer.safetensors"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""Errors of files that are missing, damaged or not what their names say."""


@dataclass(frozen=True)
class BaseModel:
    """The base of adapters, as their files describe it."""

    name: str
    """Folder or hub id."""
    fuses_experts: bool
    """Whether the experts of a layer are one tensor."""


def write_adapter_folder(
    folder: Path, adapter: AdapterTensors, base: BaseModel, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write an adapter, and the state of its optimizer if given, into a new folder.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists. An adapter is written into a new folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(partial, adapter, base, state)
        flush_tree(partial)
        os.rename(partial, folder)
        flush_folder(folder.parent)
    except OSError as error:
        free = free_bytes(folder)
        shutil.rmtree(partial, ignore_errors=True)
        needed = sum(value.nbytes for value in (*adapter.parameters().values(), *(state or {}).values()))
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error} ({readable_bytes(needed)} are needed and "
            f"{readable_bytes(free)} are free). Free space there."
        ) from error


def _write_files(folder: Path, adapter: AdapterTensors, base: BaseModel, state: Mapping[str, Tensor] | None) -> None:
    tensors = {peft_key(name): _plain(value) for name, value in adapter.parameters().items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    shape = adapter.shape
    config = LoraConfig.build(enabled=True, dim=shape.rank)
    described = peft_config(config, base.name, list(adapter.pairs), fused_experts=base.fuses_experts)
    described["lora_alpha"] = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    _write_json(folder / CONFIG_FILE, described)
    _write_json(folder / SHAPE_FILE, {_stored_name(name): value for name, value in asdict(shape).items()})
    if state is not None:
        (folder / OPTIMIZER_FILE).write_bytes(save({name: _plain(value) for name, value in state.items()}))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous()


def read_adapter_folder(folder: Path, slots: AdapterSlots, device: torch.device) -> AdapterTensors:
    """Read an adapter of this library or of PEFT.

    Args:
        folder: the folder.
        slots: the slots of the base model.
        device: device of the matrices.

    Raises:
        CheckpointError: the folder has no plain adapter, its layers or sizes are not those of the base model, or its
            values are not finite.
    """
    try:
        shape, names = _read_shape(folder, slots)
        saved = TensorFiles([folder / WEIGHTS_FILE])
        tensors = {key: saved.read(key) for key in saved}
    except _UNREADABLE as error:
        raise CheckpointError(f"{folder} has no adapter that can be read: {type(error).__name__}: {error}") from error
    pairs = {}
    for name in names:
        num_out, num_in = slots.sizes[name]
        a = _matrix(folder, tensors, f"{name}.lora_A", (shape.rank, num_in))
        b = _matrix(folder, tensors, f"{name}.lora_B", (num_out, shape.rank))
        pairs[name] = LowRankPair(a.to(device), b.to(device), shape.scaling)
    return AdapterTensors(shape, pairs)


def _read_shape(folder: Path, slots: AdapterSlots) -> tuple[AdapterShape, list[str]]:
    """Return the shape of a folder's adapter and the names of its layers."""
    described = read_peft_config(folder)
    extensions = extensions_of(described)
    if extensions:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} describes more than a plain LoRA adapter: {', '.join(extensions)}."
        )
    keys = (key.removeprefix(PEFT_PREFIX) for key in TensorFiles([folder / WEIGHTS_FILE]))
    names = list(dict.fromkeys(key.rpartition(".lora_")[0] for key in keys))
    foreign = [name for name in names if name not in slots.sizes]
    if foreign or not names:
        raise CheckpointError(
            f"{folder} does not fit the base model: {len(foreign)} of {len(names)} adapted layers are no linear layers "
            f"of it{f', for example {foreign[0]!r}' if foreign else ''}."
        )
    # The order of a new adapter's layers, not of the file: the norm of the gradient is added up in it.
    kept = set(names)
    names = [name for name in slots.sizes if name in kept]
    whole = AdapterShape(int(described["r"]), float(described["lora_alpha"]), **_groups(names, slots.head))
    if (folder / SHAPE_FILE).exists():
        stored = json.loads(read_text(folder / SHAPE_FILE))
        return AdapterShape(**{name: stored[_stored_name(name)] for name in asdict(whole)}), names
    return whole, names


def _stored_name(field: str) -> str:
    """Return the name in `SHAPE_FILE` of a field of `AdapterShape`."""
    return field.removeprefix("train_")


def _groups(names: list[str], head: str | None) -> dict[str, Any]:
    """Return which groups of layers an adapter has, by the names of its layers."""
    others = [name for name in names if name != head]
    mlp = [is_of_mlp(name) for name in others]
    return {"train_attn": not all(mlp), "train_mlp": any(mlp), "train_unembed": len(others) < len(names)}


def _matrix(folder: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    """Return a matrix in float32 after checking its shape and values."""
    value = tensors.get(peft_key(name))
    if value is None or tuple(value.shape) != shape:
        found = "missing" if value is None else tuple(value.shape)
        raise CheckpointError(f"{folder} does not fit the base model: {name} is {found}, and {shape} is needed.")
    value = value.float()
    if not value.isfinite().all():
        raise CheckpointError(f"{folder} has values that are not finite, in {name}.")
    return value


def read_optimizer_state(folder: Path, adapter: AdapterTensors) -> dict[str, Tensor]:
    """Read the optimizer's state of an adapter that `read_adapter_folder` returned.

    Raises:
        CheckpointError: the folder has no such state, or that of another adapter.
    """
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(f"{folder} has no optimizer state. Load its weights without the optimizer.")
    saved = TensorFiles([folder / OPTIMIZER_FILE])
    expected = expected_state(adapter)
    state = {name: saved.read(name) for name in saved}
    for name, value in state.items():
        if tuple(value.shape) != expected.get(name):
            raise CheckpointError(
                f"{folder / OPTIMIZER_FILE} is of another adapter: it has {name} {tuple(value.shape)}."
            )
    return state
