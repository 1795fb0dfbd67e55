"""Copy model folders, optionally in another dtype, and read and write folders of adapters (PEFT).

A model folder has safetensors files, configuration and tokenizer. No model is built to copy it. Invariant: the copy can
be loaded in the same ways as the source, and its config.json and index describe the files correctly.

A folder of an adapter has the adapter_config.json and adapter_model.safetensors that `PeftModel.from_pretrained` loads.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from nemo_rl.config.schema.model.parallel import AdapterConfig
from nemo_rl.data.images.messages import images_of
from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.regular_file import read_text
from nemo_rl.files.trusted_code import copy_code
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.huggingface.layers import SCORE_HEAD
from nemo_rl.models.huggingface.load import stays_float32_in_files
from nemo_rl.models.huggingface.tensor_files import TensorFiles, model_folder, write_file
from nemo_rl.utils.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FOLDER = "model"
"""Subfolder of a weights folder that `from_pretrained` loads."""
CONSOLIDATED_FOLDER = "consolidated"
TENSOR_FILES = "*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer, and the files of its image processor if it reads images.

    Transformers and vLLM load the folder as they load the folder of the tokenizer.
    """
    tokenizer.save_pretrained(str(folder))
    copy_code(str(tokenizer.name_or_path), folder)
    if images_of(tokenizer) is not None:
        source = model_folder(str(tokenizer.name_or_path))
        for name in PROCESSOR_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


def copy_model_folder(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the files of a model folder, without its subfolders.

    One tensor is in memory at a time.

    Args:
        source: a folder that `from_pretrained` loads.
        target: folder that is created if it does not exist; it may be inside `source`.
        dtype: dtype of floating-point weights, except those that stay float32 (`stays_float32_in_files`); if None,
            files are copied bit for bit.
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
    """Write a file's tensors in another dtype unless `stays` is True for them, and yield after each tensor."""

    def converted(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and not stays(name) else tensor

    likes = {name: converted(name, source.like(name)) for name in source}
    return write_file(target, likes, ((name, converted(name, source.read(name))) for name in source))


def _architecture(folder: Path) -> str | None:
    """Return the name of the model class in a folder's config.json, or None if there is none."""
    path = folder / "config.json"
    names = json.loads(read_text(path)).get("architectures") if path.exists() else None
    return names[0] if names else None


def _note_dtype(target: Path, dtype: torch.dtype) -> None:
    """Write the new dtype into config.json, and the new size into the index."""
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


ADAPTER_FOLDER = "adapter"
"""Subfolder of a weights folder that holds the adapter."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_EXTENSIONS = ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
_EXPERT_LAYERS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def peft_key(name: str) -> str:
    """Return the key that PEFT uses for an adapter's parameter `<layer>.lora_A` or `<layer>.lora_B`."""
    return f"{PEFT_PREFIX}{name}.weight"


def peft_config(
    config: AdapterConfig, base_name: str, names: Sequence[str], *, fused_experts: bool, scores: bool = False
) -> dict[str, Any]:
    """Build the adapter_config.json of an adapter.

    In a model with fused experts, PEFT treats every layer with the name of an expert's layer as an expert, and would
    drop the adapters of dense and shared layers with such names. Therefore these layers are listed as weights
    (`target_parameters`). PEFT then requires dropout 0, which has no effect because inference does not use dropout.

    Args:
        config: the adapter's shape and dropout.
        names: names of the adapted layers in the Hugging Face model.
        fused_experts: whether the Hugging Face model keeps the experts of a layer in one tensor.
        scores: whether the model is a sequence classifier, whose head is saved with the adapter.
    """
    taken = [name for name in names if name.rpartition(".")[2] in _EXPERT_LAYERS] if fused_experts else []
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": config.dim,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0 if taken else config.dropout,
        "target_modules": [name for name in names if name not in taken],
        "target_parameters": [f"{name}.weight" for name in taken] or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "modules_to_save": [SCORE_HEAD] if scores else None,
    }


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Read the adapter_config.json of a LoRA adapter.

    Raises:
        CheckpointError: the folder has no such file.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}, so it is not a LoRA adapter.")
    described: dict[str, Any] = json.loads(read_text(file))
    return described


def extensions_of(described: Mapping[str, Any]) -> list[str]:
    """Return the settings of an adapter_config.json with which a layer is not `W + (alpha / r) B A`."""
    extensions = [name for name in _EXTENSIONS if described.get(name)]
    extensions += ["peft_type"] if described.get("peft_type") != "LORA" else []
    return extensions + (["bias"] if described.get("bias", "none") != "none" else [])


def adapter_scaling(folder: Path) -> float:
    """Return the factor `alpha / r` by which an adapter's product B A is multiplied.

    Raises:
        CheckpointError: the folder has no adapter_config.json.
    """
    described = read_peft_config(folder)
    return float(described["lora_alpha"] / described["r"])


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write an adapter's folder. All ranks must call this, and rank 0 writes.

    Args:
        folder: created if it does not exist.
        tensors: tensors by `peft_key`.
        described: result of `peft_config`.
        group: process group of all ranks; if None, the default group.
    """
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / WEIGHTS_FILE).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
            (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
