"""Read and write the adapter_config.json and adapter_model.safetensors that `PeftModel.from_pretrained` loads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from nemo_rl.config.schema.model.parallel import AdapterConfig
from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.regular_file import read_text
from nemo_rl.utils.errors import CheckpointError

ADAPTER_FOLDER = "adapter"
"""Subfolder of a weights folder that holds the adapter."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_EXPERT_LAYERS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def peft_key(name: str) -> str:
    """Return PEFT's key for `<layer>.lora_A` or `<layer>.lora_B`, a parameter's name in the Hugging Face model."""
    return f"{PEFT_PREFIX}{name}.weight"


def peft_config(config: AdapterConfig, base_name: str, names: Sequence[str], *, fused_experts: bool) -> dict[str, Any]:
    """Build the adapter_config.json of an adapter.

    In a model with fused experts, PEFT treats every layer with the name of an expert's layer as an expert, so it would
    lose the adapters of dense and shared layers with these names. So such layers are given by their weights
    (`target_parameters`). PEFT then requires dropout 0, which has no effect because inference uses no dropout.

    Args:
        config: the adapter's shape and dropout.
        base_name: `policy.model_name`.
        names: names of the adapted layers in the Hugging Face model.
        fused_experts: whether that model keeps the experts of a layer in one tensor.
    """
    taken = [name for name in names if name.rpartition(".")[2] in _EXPERT_LAYERS] if fused_experts else []
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
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
        "modules_to_save": None,
    }


def adapter_scaling(folder: Path) -> float:
    """Return the factor of B A when it is added to a weight.

    Raises:
        CheckpointError: the folder has no adapter_config.json.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}, so it is no LoRA adapter.")
    described = json.loads(read_text(file))
    return float(described["lora_alpha"] / described["r"])


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write an adapter's folder; all ranks call this, rank 0 writes.

    Args:
        folder: created if it does not exist.
        tensors: tensors by `peft_key`.
        described: result of `peft_config`.
        group: process group of all ranks; None is the default one.
    """
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / WEIGHTS_FILE).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
            (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
