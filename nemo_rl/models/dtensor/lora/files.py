"""Write and read LoRA adapters in the format of the PEFT library.

Layout (W = weights folder of a checkpoint):

    W/model/     merged weights, written by `checkpoint_io`, loaded by `from_pretrained` and engines
    W/adapter/   adapter_config.json, adapter_model.safetensors: `PeftModel.from_pretrained(base, folder)`

Invariant: a resumed run has the base of `policy.model_name` and the adapter of the checkpoint, bit for bit; a base
other than the one that the checkpoint was trained on is refused.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import LoraConfig
from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.dtensor.checkpoints.model_files import saved_weights
from nemo_rl.models.dtensor.checkpoints.weight_files import local_box
from nemo_rl.models.dtensor.lora.modules import adapted_modules, apply_lora
from nemo_rl.models.dtensor.pipeline.weights import joined, of_all_stages
from nemo_rl.models.huggingface.checkpoint_names import Group, converts, groups_in_memory
from nemo_rl.models.huggingface.folders import MODEL_FOLDER
from nemo_rl.models.huggingface.peft_folder import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    peft_config,
    peft_key,
    write_adapter,
)
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS
from nemo_rl.utils.errors import CheckpointError

_NOT_MERGED = ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
_MERGE_TOLERANCE = 1e-5


def save_adapter(
    hf: PreTrainedModel, config: LoraConfig, base_name: str, weights_path: Path, keep: Keep = as_it_is
) -> Write:
    """Prepare to write the adapter; all ranks take part, rank 0 writes.

    Args:
        hf: the adapted model, sharded or not.
        config: the `lora_cfg` section of the adapters.
        base_name: `policy.model_name`.
        weights_path: the W of the module docstring.
        keep: applied to every tensor that will be written.
    """
    mine = ((name, whole(parameter.detach())) for name, parameter in _adapter_parameters(hf).items())
    named = of_all_stages(hf, mine)
    tensors = {peft_key(name): keep(f"adapter.{name}", tensor.cpu().contiguous()) for name, tensor in named}
    names = list(joined(hf, dict.fromkeys(adapted_modules(hf))))
    described = peft_config(config, base_name, names, fused_experts=converts(hf))
    return partial(write_adapter, weights_path / ADAPTER_FOLDER, tensors, described)


def load_adapter(hf: PreTrainedModel, weights_path: Path, device: torch.device) -> None:
    """Read an adapter into the adapted model in place; each rank reads its own part.

    Args:
        hf: the adapted model, its base loaded from `policy.model_name`.
        weights_path: the W of the module docstring.
        device: device that computes merged weights, to compare them with the saved ones.

    Raises:
        CheckpointError: there is no adapter, it has other layers or shapes, or it belongs to another base.
    """
    folder = weights_path / ADAPTER_FOLDER
    if not (folder / WEIGHTS_FILE).exists():
        raise CheckpointError(
            f"{folder} holds no {WEIGHTS_FILE}: the checkpoint was written without LoRA. Set "
            f"policy.dtensor_cfg.lora_cfg.enabled=false, or start a new run from policy.model_name="
            f"{weights_path / MODEL_FOLDER}."
        )
    _fill_adapters(hf, folder)
    _check_base(hf, weights_path / MODEL_FOLDER, device)


def attach_adapter(hf: PreTrainedModel, folder: Path) -> None:
    """Put a saved adapter, of this library or of PEFT, on an unsharded base model, without merging it.

    Args:
        hf: the base model.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        CheckpointError: the folder holds no adapter, one that `W + (alpha / r) B A` does not describe, or one for
            other layers.
    """
    described = read_adapter_config(folder)
    tensors = TensorFiles([folder / WEIGHTS_FILE])
    names = sorted({key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors})
    have = {name for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in names if name not in have]
    if missing:
        raise CheckpointError(
            f"{folder} does not fit the base model {type(hf).__name__}: {len(missing)} of {len(names)} adapted layers "
            f"are no linear layers of it, for example {missing[0]!r}. Give the model that the adapter was trained on."
        )
    config = LoraConfig.build(
        enabled=True,
        dim=described["r"],
        alpha=described["lora_alpha"],
        match_all_linear=False,
        target_modules=names,
    )
    apply_lora(hf, config, seed=0)
    _fill_adapters(hf, folder)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the adapter_config.json of a plain LoRA adapter.

    Raises:
        CheckpointError: a file is missing, or the adapter is not `W + (alpha / r) B A`.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} holds no {name}, so it is no LoRA adapter.")
    described: dict[str, Any] = json.loads(read_text(folder / CONFIG_FILE))
    plain = described.get("peft_type") == "LORA" and isinstance(described.get("lora_alpha"), int)
    extras = [name for name in _NOT_MERGED if described.get(name)]
    extras += ["bias"] if described.get("bias", "none") != "none" else []
    if not plain or extras:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} describes more than a plain LoRA adapter with a whole lora_alpha"
            f"{': ' + ', '.join(extras) if extras else ''}. Merge it with the PEFT library."
        )
    return described


@torch.no_grad()
def _fill_adapters(hf: PreTrainedModel, folder: Path) -> None:
    """Copy saved values into the adapters; each rank copies its own part."""
    saved = TensorFiles([folder / WEIGHTS_FILE])
    parameters = {peft_key(name): tensor for name, tensor in _adapter_parameters(hf).items()}
    shapes = joined(hf, {key: tuple(tensor.shape) for key, tensor in parameters.items()})
    _require_same_shapes(folder, {key: saved.like(key) for key in saved}, shapes)
    for key, parameter in parameters.items():
        if held_here(parameter).numel() > 0:
            held_here(parameter).copy_(saved.read(key, local_box(parameter)))


def refuse_adapter(weights_path: Path) -> None:
    """Refuse to resume full training from a checkpoint of LoRA training.

    Raises:
        CheckpointError: the folder holds an adapter.
    """
    if (weights_path / ADAPTER_FOLDER).exists():
        raise CheckpointError(
            f"{weights_path} was written with LoRA. Set policy.dtensor_cfg.lora_cfg.enabled=true to resume, or "
            f"start a new run from the merged weights: policy.model_name={weights_path / MODEL_FOLDER}."
        )


@torch.no_grad()
def _check_base(hf: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """Compare base plus adapter with the merged weights of the checkpoint; each rank compares its own rows."""
    adapted = {f"{name}.weight": module for name, module in adapted_modules(hf).items()}
    close: dict[str, bool] = {}
    tensors = saved_weights(folder)
    for group in groups_in_memory(hf, tensors):
        if group.converter is None and group.target in adapted:
            merged = adapted.pop(group.target).merged_weight(device)
            close[group.target] = _close(held_here(merged), _saved_part(tensors, group, merged).to(device))
    if adapted:
        raise CheckpointError(f"{folder} does not fit {type(hf).__name__}: it lacks {next(iter(adapted))}.")
    close = joined(hf, close)
    agreed = torch.tensor(list(close.values()), device=device).int()
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    wrong = [name for name, same in zip(close, agreed.tolist(), strict=True) if not same]
    if wrong:
        raise CheckpointError(
            f"policy.model_name plus the adapter is not what {folder} holds: {len(wrong)} weights differ, the "
            f"first {wrong[0]}. The adapter was trained on another model, or with another alpha."
        )


def _saved_part(tensors: TensorFiles, group: Group, like: Tensor) -> Tensor:
    """Read this rank's part of a weight from the files."""
    mine = held_here(like)
    return tensors.read(next(iter(group.sources)), local_box(like)) if mine.numel() > 0 else mine


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.numel() == 0:
        return True
    return (ours - theirs).abs().max().item() <= _MERGE_TOLERANCE * theirs.abs().max().item()


def _adapter_parameters(hf: PreTrainedModel) -> dict[str, Tensor]:
    return {
        f"{name}.{last}": getattr(module, last)
        for name, module in adapted_modules(hf).items()
        for last in ADAPTER_PARAMETERS
    }


def _require_same_shapes(folder: Path, saved: dict[str, Tensor], wanted_shapes: dict[str, tuple[int, ...]]) -> None:
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    different = sorted(dict(saved_shapes.items() ^ wanted_shapes.items()))
    if different:
        first = different[0]
        raise CheckpointError(
            f"{folder} does not fit policy.dtensor_cfg.lora_cfg: {len(different)} tensors differ, for example "
            f"{first}: {saved_shapes.get(first, 'missing')} in the checkpoint, "
            f"{wanted_shapes.get(first, 'missing')} in this run."
        )
