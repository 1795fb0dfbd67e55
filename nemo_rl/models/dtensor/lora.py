"""Read the weights of a model with a LoRA adapter (`adapters.lora_linear`), and read and write its files.

`adapters.lora_linear.apply_lora` adds adapters after the model is made and before it is sharded. Weight sync and
checkpoints read merged weights. Invariant: base weights never change. Code outside of `models.dtensor` sees plain
weights under Hugging Face names; each weight is merged when it is read. With `lora_refit_mode=adapter`, engines have
the same layers, and a weight sync reads A and B only (`held_adapters`).

The head of a reward model or critic (`score`) has no adapter. It is trained as a whole, and belongs to the adapter's
files as PEFT's `modules_to_save`.

`save_adapter` and `load_adapter` use the format of the PEFT library. Layout (W = weights folder of a checkpoint):

    W/model/     merged weights, written by `checkpoints.model_files`, loaded by `from_pretrained` and engines
    W/adapter/   adapter_config.json, adapter_model.safetensors: `PeftModel.from_pretrained(base, folder)`

Invariant: a resumed run has the base of `policy.model_name` and the adapter of the checkpoint, bit for bit. An error is
raised if the base is not the one that the adapter was trained on.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import LoraConfig
from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.distributed.ranks.tensor_block import block_here
from nemo_rl.models.adapters.lora_linear import SECTION, adapted_modules, adapter_parameters, apply_lora
from nemo_rl.models.dtensor.checkpoints.model_files import saved_weights, weights_by_name
from nemo_rl.models.dtensor.pipeline.stages import joined, of_all_stages, stage_of
from nemo_rl.models.huggingface import folders
from nemo_rl.models.huggingface.checkpoint_names import TensorGroup, converts, groups_in_memory
from nemo_rl.models.huggingface.layers import SCORE_HEAD, score_head
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, require_moved
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.weight_sync.parts import Held, Readable, dtype_name


def merged_by_name(hf: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model_files.weights_by_name`, with each adapter merged into its layer's weight.

    Merged weights are computed one at a time, on `device`; all other tensors are the model's own. All ranks must
    exhaust the iterator together.
    """
    adapted = adapted_modules(hf)
    for name, tensor in weights_by_name(hf).items():
        owner, _, last = name.rpartition(".")
        if owner not in adapted:
            yield name, tensor
        elif last == "weight":
            yield name, adapted[owner].merged_weight(device)
        elif last not in ADAPTER_PARAMETERS:
            yield name, tensor


def held_adapters(hf: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[Readable]:
    """Yield this rank's blocks of A and B of every adapted layer.

    Args:
        hf: the adapted model, or this rank's pipeline stage of the model.
        dtype: type in which they are sent.
        device: device of the values that are read.
    """
    stage = stage_of(hf)
    number = 0 if stage is None else stage.place.number
    for position, (name, parameter) in enumerate(adapter_parameters(hf).items()):
        place = block_here(parameter)
        blocks = (place,) if place.numel else ()
        described = Held(name, dtype_name(dtype), tuple(parameter.shape), (number, position), blocks)
        yield Readable(described, partial(_block, parameter, dtype, device))


def _block(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    mine = held_here(parameter.detach())
    return [mine.to(device, dtype)] if mine.numel() else []


def merge_adapters(hf: nn.Module) -> None:
    """Replace adapted layers with plain layers that hold the merged weights, in unsharded models only."""
    for name, module in adapted_modules(hf).items():
        merged = nn.Linear(module.in_features, module.out_features, bias=False, device="meta").train(module.training)
        merged.weight = nn.Parameter(module.merged_weight(module.weight.device), requires_grad=False)
        if module.bias is not None:
            merged.bias = nn.Parameter(module.bias, requires_grad=False)
        parent_name, _, child = name.rpartition(".")
        setattr(hf.get_submodule(parent_name), child, merged)


@torch.no_grad()
def check_adapters_moved(hf: nn.Module, device: torch.device) -> None:
    """Check after an update that every adapter changes its layer. The call is collective.

    Raises:
        ConfigError: raised by `low_rank.require_moved`.
    """
    mine = {name: int(held_here(module.lora_B).count_nonzero()) for name, module in adapted_modules(hf).items()}
    modules = joined(hf, mine)
    moved = torch.tensor(list(modules.values()), device=device)
    dist.all_reduce(moved)
    require_moved(dict(zip(modules, moved.tolist(), strict=True)), SECTION)


_HEADS = {SCORE_HEAD, "classifier"}
"""Names of heads that PEFT saves with the adapter of a sequence classifier, whichever of them the model has."""
_MERGE_TOLERANCE = 1e-5


def save_adapter(
    hf: PreTrainedModel, config: LoraConfig, base_name: str, weights_path: Path, keep: Keep = as_it_is
) -> Write:
    """Prepare to write the adapter. All ranks must call this, and rank 0 writes.

    Args:
        hf: the adapted model, sharded or not.
        config: the `lora_cfg` section of the adapters.
        weights_path: the folder W of the module docstring.
        keep: applied to every tensor that will be written.
    """
    mine = ((key, whole(parameter.detach())) for key, parameter in _trained_parameters(hf).items())
    named = of_all_stages(hf, mine)
    tensors = {key: keep(f"adapter.{key}", tensor.cpu().contiguous()) for key, tensor in named}
    names = list(joined(hf, dict.fromkeys(adapted_modules(hf))))
    scores = any(joined(hf, {SCORE_HEAD: True} if score_head(hf) is not None else {}))
    described = folders.peft_config(config, base_name, names, fused_experts=converts(hf), scores=scores)
    return partial(folders.write_adapter, weights_path / folders.ADAPTER_FOLDER, tensors, described)


def load_adapter(hf: PreTrainedModel, weights_path: Path, device: torch.device) -> None:
    """Read this rank's part of an adapter into the adapted model in place.

    Args:
        hf: the adapted model, with its base loaded from `policy.model_name`.
        weights_path: the folder W of the module docstring.
        device: device that computes merged weights, to compare them with the saved ones.

    Raises:
        CheckpointError: there is no adapter, its layers or shapes differ, or it was trained on another base.
    """
    folder = weights_path / folders.ADAPTER_FOLDER
    if not (folder / folders.WEIGHTS_FILE).exists():
        raise CheckpointError(
            f"{folder} holds no {folders.WEIGHTS_FILE}: the checkpoint was written without LoRA. Set "
            f"policy.dtensor_cfg.lora_cfg.enabled=false, or start a new run from policy.model_name="
            f"{weights_path / folders.MODEL_FOLDER}."
        )
    _fill_adapters(hf, folder)
    _check_base(hf, weights_path / folders.MODEL_FOLDER, device)


def attach_adapter(hf: PreTrainedModel, folder: Path) -> None:
    """Add a saved adapter, of this library or of PEFT, to an unsharded base model, without merging it.

    Args:
        hf: the base model.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        CheckpointError: the folder holds no adapter, the adapter is not `W + (alpha / r) B A`, or the base model lacks
            its layers.
    """
    described = read_adapter_config(folder)
    tensors = TensorFiles([folder / folders.WEIGHTS_FILE])
    of_layers = (key.removeprefix(folders.PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors)
    names = sorted({name for name in of_layers if name})
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
    described = folders.read_peft_config(folder)
    if not (folder / folders.WEIGHTS_FILE).exists():
        raise CheckpointError(f"{folder} holds no {folders.WEIGHTS_FILE}, so it is not a LoRA adapter.")
    extensions = folders.extensions_of(described)
    if is_scoring_adapter(described) and set(described["modules_to_save"]) <= _HEADS:
        extensions.remove("modules_to_save")
    if extensions or not isinstance(described.get("lora_alpha"), int):
        raise CheckpointError(
            f"{folder / folders.CONFIG_FILE} describes more than a plain LoRA adapter with a whole lora_alpha"
            f"{': ' + ', '.join(extensions) if extensions else ''}. Merge it with the PEFT library."
        )
    return described


def is_scoring_adapter(described: dict[str, Any]) -> bool:
    """Return whether an adapter_config.json belongs to a sequence classifier whose head is in the adapter's file."""
    return described.get("task_type") == "SEQ_CLS" and bool(described.get("modules_to_save"))


@torch.no_grad()
def _fill_adapters(hf: PreTrainedModel, folder: Path) -> None:
    """Copy this rank's part of the saved values into the adapters."""
    saved = TensorFiles([folder / folders.WEIGHTS_FILE])
    parameters = _trained_parameters(hf)
    shapes = joined(hf, {key: tuple(tensor.shape) for key, tensor in parameters.items()})
    _require_same_shapes(folder, {key: saved.like(key) for key in saved}, shapes)
    for key, parameter in parameters.items():
        if held_here(parameter).numel() > 0:
            held_here(parameter).copy_(saved.read(key, block_here(parameter)))


def refuse_adapter(weights_path: Path) -> None:
    """Refuse to resume full training from a checkpoint of LoRA training.

    Raises:
        CheckpointError: the folder holds an adapter.
    """
    if (weights_path / folders.ADAPTER_FOLDER).exists():
        raise CheckpointError(
            f"{weights_path} was written with LoRA. Set policy.dtensor_cfg.lora_cfg.enabled=true to resume, or "
            f"start a new run from the merged weights: policy.model_name={weights_path / folders.MODEL_FOLDER}."
        )


@torch.no_grad()
def _check_base(hf: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """Compare this rank's rows of base model plus adapter with the merged weights of the checkpoint."""
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


def _saved_part(tensors: TensorFiles, group: TensorGroup, like: Tensor) -> Tensor:
    """Read this rank's part of a weight from the files."""
    mine = held_here(like)
    return tensors.read(next(iter(group.sources)), block_here(like)) if mine.numel() > 0 else mine


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.numel() == 0:
        return True
    return (ours - theirs).abs().max().item() <= _MERGE_TOLERANCE * theirs.abs().max().item()


def _trained_parameters(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters of adapters and of a sequence classifier's head, by their keys in PEFT's files."""
    found = {folders.peft_key(name): parameter for name, parameter in adapter_parameters(hf).items()}
    head = score_head(hf)
    named = () if head is None else head.named_parameters()
    return found | {f"{folders.PEFT_PREFIX}{SCORE_HEAD}.{name}": parameter for name, parameter in named}


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
