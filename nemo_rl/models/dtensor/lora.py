"""Add LoRA adapters (Hu et al. 2021, arXiv:2106.09685) to a frozen model, and read and write their files.

`apply_lora` adds adapters after the model is made and before it is sharded. Weight sync and checkpoints read merged
weights. Invariant: base weights never change. Code outside of `models.dtensor` sees plain weights under Hugging Face
names; each weight is merged when it is read.

FSDP2 and tensor parallelism divide an adapted layer's weight `[out, in]` and its B `[out, dim]` by the same rows, and A
`[dim, in]` by the weight's columns. A rank therefore merges its own part, and only the small A is gathered.

The head of a reward model or critic (`score`) has no adapter. It is trained as a whole, and belongs to the adapter's
files as PEFT's `modules_to_save`.

`save_adapter` and `load_adapter` use the format of the PEFT library. Layout (W = weights folder of a checkpoint):

    W/model/     merged weights, written by `checkpoints.model_files`, loaded by `from_pretrained` and engines
    W/adapter/   adapter_config.json, adapter_model.safetensors: `PeftModel.from_pretrained(base, folder)`

Invariant: a resumed run has the base of `policy.model_name` and the adapter of the checkpoint, bit for bit. An error is
raised if the base is not the one that the adapter was trained on.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import LoraConfig
from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.distributed.ranks.tensor_block import block_here
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.adapters.slots import linear_names
from nemo_rl.models.dtensor.checkpoints.model_files import saved_weights, weights_by_name
from nemo_rl.models.dtensor.pipeline.stages import joined, of_all_stages
from nemo_rl.models.huggingface.checkpoint_names import TensorGroup, converts, groups_in_memory
from nemo_rl.models.huggingface.folders import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    MODEL_FOLDER,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    peft_config,
    peft_key,
    write_adapter,
)
from nemo_rl.models.huggingface.layers import SCORE_HEAD, score_head
from nemo_rl.models.huggingface.recurrent import compute_unfused
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, generator_of, initial_a, require_moved, select_modules
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

SECTION = "policy.dtensor_cfg.lora_cfg"


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two low-rank matrices.

    `y = x W^T + bias + (alpha / dim) x A^T B^T`. Dropout applies to x before A (`pre`) or to the product
    (`post`), in training mode only.

    Args:
        base: the layer to adapt; its parameters are reused and frozen.
        config: the adapter's shape and dropout.
        generator: random generator for A.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight.requires_grad_(False)
        """`[out, in]`, frozen. It is the base layer's own parameter, so its name does not change."""
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        """`[out]`, frozen, or None."""
        a = initial_a(config.dim, base.in_features, config.lora_A_init, base.weight.dtype, generator)
        self.lora_A = nn.Parameter(a if base.weight.is_meta else a.to(base.weight.device))
        """`[dim, in]`."""
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(base.out_features, config.dim))
        """`[out, dim]`, zero at the start, so that a new adapter has no effect."""
        self.scaling = config.alpha / config.dim
        self.dropout, self.dropout_position = config.dropout, config.dropout_position
        self.active = True
        """If False, only the base layer is computed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        out = F.linear(x, self.weight, self.bias)
        if not self.active:
            return out
        if self.dropout_position == "pre":
            x = F.dropout(x, self.dropout, self.training)
        update = F.linear(F.linear(x, self.lora_A), self.lora_B)
        if self.dropout_position == "post":
            update = F.dropout(update, self.dropout, self.training)
        return out + self.scaling * update

    @torch.no_grad()
    def merged_weight(self, device: torch.device) -> Tensor:
        """Return `W + (alpha / dim) B A` as a new tensor on `device`. The call is collective if W is sharded."""
        a, b, weight = (t.detach().to(device) for t in (self.lora_A, self.lora_B, self.weight))
        if not isinstance(weight, DTensor):
            return torch.addmm(weight, b, a, alpha=self.scaling)
        assert isinstance(a, DTensor) and isinstance(b, DTensor), "adapters are sharded with their layer"
        _, columns = block_here(weight).slices
        local = torch.addmm(weight.to_local(), b.to_local(), whole(a)[:, columns], alpha=self.scaling)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def apply_lora(hf: PreTrainedModel, config: LoraConfig, seed: int) -> list[str]:
    """Freeze the model and add adapters to its linear layers in place, before sharding.

    The head of a sequence classifier is not frozen, because a language model as its base has no such head. A is drawn
    from the run's seed and the layer's name, so that it is equal on all ranks and after a restart.

    Args:
        hf: the unsharded model.
        config: the layers to adapt, and the adapters' shape.

    Returns:
        Names of the adapted layers.

    Raises:
        ConfigError: a pattern matches no linear layer, no layer is selected, or a selected layer shares its weight.
    """
    names = select_modules(linear_names(hf), config, SECTION)
    _refuse_shared(hf, names)
    compute_unfused(hf)
    hf.requires_grad_(False)
    head = score_head(hf)
    if head is not None:
        head.requires_grad_(True)
    for name in names:
        parent_name, _, child = name.rpartition(".")
        base = hf.get_submodule(name)
        assert isinstance(base, nn.Linear)
        adapted = LoraLinear(base, config, generator_of(seed, name)).train(base.training)
        setattr(hf.get_submodule(parent_name), child, adapted)
    trained = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    total = sum(p.numel() for p in hf.parameters())
    logger.info(
        "LoRA: %d adapted layers, %d of %d parameters trained (%.2f %%).",
        len(names),
        trained,
        total,
        100 * trained / total,
    )
    return names


def adapted_modules(hf: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers by name. The dict is empty without LoRA."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLinear)}


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


def _refuse_shared(hf: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse adapters on a weight that layers share, because the adapter would change only one of the layers."""
    uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
    shared = [name for name in names if uses[id(hf.get_parameter(f"{name}.weight"))] > 1]
    if shared:
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg adapts layers whose weight is shared with others: {', '.join(shared)}. "
            "Name them in policy.dtensor_cfg.lora_cfg.exclude_modules."
        )


_NOT_MERGED = ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
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
    described = peft_config(config, base_name, names, fused_experts=converts(hf), scores=scores)
    return partial(write_adapter, weights_path / ADAPTER_FOLDER, tensors, described)


def load_adapter(hf: PreTrainedModel, weights_path: Path, device: torch.device) -> None:
    """Read this rank's part of an adapter into the adapted model in place.

    Args:
        hf: the adapted model, with its base loaded from `policy.model_name`.
        weights_path: the folder W of the module docstring.
        device: device that computes merged weights, to compare them with the saved ones.

    Raises:
        CheckpointError: there is no adapter, its layers or shapes differ, or it was trained on another base.
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
    """Add a saved adapter, of this library or of PEFT, to an unsharded base model, without merging it.

    Args:
        hf: the base model.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        CheckpointError: the folder holds no adapter, the adapter is not `W + (alpha / r) B A`, or the base model lacks
            its layers.
    """
    described = read_adapter_config(folder)
    tensors = TensorFiles([folder / WEIGHTS_FILE])
    of_layers = (key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors)
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
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} holds no {name}, so it is not a LoRA adapter.")
    described: dict[str, Any] = json.loads(read_text(folder / CONFIG_FILE))
    plain = described.get("peft_type") == "LORA" and isinstance(described.get("lora_alpha"), int)
    extras = [name for name in _NOT_MERGED if described.get(name)]
    if is_scoring_adapter(described) and set(described["modules_to_save"]) <= _HEADS:
        extras.remove("modules_to_save")
    extras += ["bias"] if described.get("bias", "none") != "none" else []
    if not plain or extras:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} describes more than a plain LoRA adapter with a whole lora_alpha"
            f"{': ' + ', '.join(extras) if extras else ''}. Merge it with the PEFT library."
        )
    return described


def is_scoring_adapter(described: dict[str, Any]) -> bool:
    """Return whether an adapter_config.json belongs to a sequence classifier whose head is in the adapter's file."""
    return described.get("task_type") == "SEQ_CLS" and bool(described.get("modules_to_save"))


@torch.no_grad()
def _fill_adapters(hf: PreTrainedModel, folder: Path) -> None:
    """Copy this rank's part of the saved values into the adapters."""
    saved = TensorFiles([folder / WEIGHTS_FILE])
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
    if (weights_path / ADAPTER_FOLDER).exists():
        raise CheckpointError(
            f"{weights_path} was written with LoRA. Set policy.dtensor_cfg.lora_cfg.enabled=true to resume, or "
            f"start a new run from the merged weights: policy.model_name={weights_path / MODEL_FOLDER}."
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
    found: dict[str, Tensor] = {
        peft_key(f"{name}.{last}"): getattr(module, last)
        for name, module in adapted_modules(hf).items()
        for last in ADAPTER_PARAMETERS
    }
    head = score_head(hf)
    named = () if head is None else head.named_parameters()
    return found | {f"{PEFT_PREFIX}{SCORE_HEAD}.{name}": parameter for name, parameter in named}


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
