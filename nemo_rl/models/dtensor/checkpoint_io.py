"""Write and read a policy's training state.

Layout (W = weights folder, O = optimizer folder), written by all ranks together:

    W/model/model-*.safetensors, model.safetensors.index.json, config.json   names and shapes as on the hub
    O/optim/                       torch distributed checkpoint, states under parameter names
    O/trainer.pt                   schedule, settings of optimizer and schedule, whether the optimizer had state
    O/rng/rank_<r>.pt              random-number generators of each rank

Invariant: a load restores every bit that a save wrote, on any number of ranks (random-number state only on
the same number), unless the settings of optimizer or schedule are others. Where one rank cannot write, all ranks raise,
so that training can go on. Folders are on storage that every rank sees; the caller makes writing atomic.
"""

import copy
import logging
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.optimizer import OptimizerSettings, hyperparameters_now, keep_implementation
from nemo_rl.models.dtensor.pipeline.stages import stage_of
from nemo_rl.models.dtensor.pipeline.weights import joined, names_here, ranks_of_stage, without_copies
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint, in_memory
from nemo_rl.models.huggingface.folders import MODEL_FOLDER
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.utils.plain_load import load_plain

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 1024**3

type Keep = Callable[[str, Tensor], Tensor]
"""What to write in a tensor's place, by its name: the tensor, or a copy that later updates leave alone."""
type Write = Callable[[dist.ProcessGroup | None], None]
"""Writes a prepared part of a checkpoint; ranks meet in the group, None is the default one."""


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, for what is written at once."""
    return tensor


def weights_by_name(hf: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the model's own names, tied ones once; no copies.

    Of a pipeline stage those that it holds, tied ones under the name that the whole model has for them.
    """
    persistent = hf.state_dict(keep_vars=True)
    named = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    for name, buffer in hf.named_buffers():
        if name in persistent:
            named[name] = buffer.detach()
    stage = stage_of(hf)
    return named if stage is None else {stage.known_as(name): tensor for name, tensor in named.items()}


def prepare_weights(
    hf: PreTrainedModel,
    weights_path: Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare weights and configuration as a folder that `from_pretrained` and engines load.

    Args:
        hf: the model, sharded or not.
        weights_path: the W of the module docstring.
        weights: what to write, by the model's names; None takes `weights_by_name`.
        keep: applied to every tensor that will be written.

    Returns:
        Writes it, and raises a CheckpointError on all ranks where one of them could not write its files.
    """
    weights = weights_by_name(hf).items() if weights is None else weights
    part, num_bytes = _part_of_this_rank(in_checkpoint(hf, without_copies(hf, weights)), ranks_of_stage(hf))
    num_bytes = joined(hf, num_bytes)
    part = {name: keep(f"weights.{name}", tensor) for name, tensor in part.items()}
    return partial(_write_weights, hf, weights_path / MODEL_FOLDER, part, num_bytes)


def _write_weights(
    hf: PreTrainedModel,
    folder: Path,
    part: dict[str, Tensor],
    num_bytes: dict[str, int],
    group: dist.ProcessGroup | None = None,
) -> None:
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=_file_numbers(num_bytes),
        save_distributed=True,
        enable_consolidation=True,
    )
    with failing_together(group):
        dcp.save(part, storage_writer=writer, process_group=group)
    with failing_together(group):
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded")
            hf.config.architectures = [type(hf).__name__]
            hf.config.save_pretrained(folder)
            if hf.can_generate() and hf.generation_config is not None:
                hf.generation_config.save_pretrained(folder)


def _part_of_this_rank(
    weights: Iterable[tuple[str, Tensor]], num_ranks: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What this rank writes: its shards, and its turns of the tensors that `num_ranks` neighbours hold whole.

    Returns:
        The tensors, and the bytes of every one of the weights.
    """
    part, num_bytes = {}, {}
    for index, (name, tensor) in enumerate(weights):
        num_bytes[name] = tensor.numel() * tensor.element_size()
        if isinstance(tensor, DTensor) or dist.get_world_size() == 1:
            part[name] = tensor
        elif index % num_ranks == dist.get_rank() % num_ranks:
            part[name] = tensor.to("cpu", copy=True)  # a copy, not a view that keeps its whole group in memory
    return part, num_bytes


@torch.no_grad()
def load_weights(hf: PreTrainedModel, weights_path: Path) -> None:
    """Read weights into the model in place, each rank its own part.

    Raises:
        CheckpointError: the folder has no weights, or they are not this model's.
    """
    folder = weights_path / MODEL_FOLDER
    missing, stage = weights_by_name(hf), stage_of(hf)
    for name, value in saved_weights(hf, folder):
        if stage is not None and name in stage.elsewhere:
            continue
        parameter = missing.pop(name, None)
        if parameter is None or parameter.shape != value.shape:
            wanted = "it has no such weight" if parameter is None else f"of shape {tuple(parameter.shape)}"
            raise CheckpointError(
                f"{folder} does not fit {type(hf).__name__}: {name} has shape {tuple(value.shape)}, {wanted}."
            )
        fill(parameter, value)
    if missing:
        raise CheckpointError(f"{folder} does not fit {type(hf).__name__}: it lacks {', '.join(sorted(missing)[:5])}.")


def saved_weights(hf: PreTrainedModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a model folder by their names in `hf`; bytes are read when they are used.

    Raises:
        CheckpointError: there are no weights, or a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors files: not a policy checkpoint.")
    home: dict[str, Any] = {}
    for file in files:
        try:
            tensors = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}.") from error
        home |= dict.fromkeys(tensors.keys(), tensors)
    return in_memory(hf, home, lambda name: home[name].get_tensor(name))


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter."""
    held_here(parameter).copy_(local_part(value, parameter))


def held_here(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`; all of it where `like` is not sharded."""
    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def prepare_training_state(
    hf: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    settings: OptimizerSettings,
    path: Path,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare optimizer, schedule and each rank's random-number state; `path` is the O above.

    Returns:
        Writes it, and raises a CheckpointError on all ranks where one of them could not write its files.
    """
    state = _kept(_optimizer_state(hf, optimizer), "optim", keep) if optimizer.state else None
    trainer = {
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "has_optimizer_state": state is not None,
        "settings": settings,
    }
    return partial(_write_training_state, path, state, trainer, rng_state())


def _write_training_state(
    path: Path,
    state: dict[str, Any] | None,
    trainer: dict[str, Any],
    rng: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    if state is not None:
        with failing_together(group):
            dcp.save({"optim": state}, checkpoint_id=str(path / "optim"), process_group=group)
    with failing_together(group):
        rng_file = _rng_file(path)
        rng_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(rng, rng_file)
        if dist.get_rank() == 0:
            torch.save(trainer, path / "trainer.pt")


def _kept(value: Any, name: str, keep: Keep) -> Any:
    """The same dicts and lists anew, with what `keep` makes of each tensor."""
    if isinstance(value, Tensor):
        return keep(name, value)
    if isinstance(value, dict):
        return {key: _kept(below, f"{name}.{key}", keep) for key, below in value.items()}
    if isinstance(value, list):
        return [_kept(below, f"{name}.{index}", keep) for index, below in enumerate(value)]
    return value


def load_training_state(
    hf: PreTrainedModel, optimizer: Optimizer, scheduler: LRScheduler, settings: OptimizerSettings, path: Path
) -> None:
    """Restore what `prepare_training_state` wrote.

    With other settings than those it was written with, the optimizer keeps its moments and gets the new
    hyperparameters; the schedule stands where it would stand had it been the new one from the first step.

    Raises:
        CheckpointError: the folder is no optimizer checkpoint, or one of another optimizer.
    """
    trainer_file = path / "trainer.pt"
    if not trainer_file.exists():
        raise CheckpointError(f"{path} holds no trainer.pt: not an optimizer checkpoint.")
    trainer = load_plain(trainer_file)
    saved = trainer.get("settings")
    new_values = None if settings == saved else hyperparameters_now(optimizer, scheduler, settings, trainer)
    if saved is not None and saved["optimizer"]["name"] != settings["optimizer"]["name"]:
        logger.warning("policy.optimizer.name has changed: the optimizer starts without moments.")
    elif trainer["has_optimizer_state"]:
        _load_moments(hf, optimizer, path / "optim")
    if new_values is None:
        scheduler.load_state_dict(trainer["scheduler"])
    else:
        for group, values in zip(optimizer.param_groups, new_values, strict=True):
            group.update(values)
    if _rng_file(path).exists():
        restore_rng_state(load_plain(_rng_file(path)))
    else:
        logger.warning("%s is missing: this rank keeps its own random-number state.", _rng_file(path))


def _load_moments(hf: PreTrainedModel, optimizer: Optimizer, path: Path) -> None:
    state = {"optim": _optimizer_state(hf, optimizer, with_copies=True)}
    mine = [group["params"] for group in state["optim"]["param_groups"]]
    try:
        dcp.load(state, checkpoint_id=str(path))
    except dcp.CheckpointException as error:
        raise CheckpointError(
            f"{path} does not fit {type(optimizer).__name__} as policy.optimizer describes it: {_reasons(error)}"
        ) from error
    keep_implementation(optimizer, state["optim"]["param_groups"])
    for group, names in zip(state["optim"]["param_groups"], mine, strict=True):
        group["params"] = names  # saved are those of one pipeline stage
    set_optimizer_state_dict(hf, optimizer, _renamed(state["optim"], names_here(hf)))


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Wait for all ranks; where one of them could not write, raise on all of them.

    Args:
        group: through which they tell each other; None takes the default one.

    Raises:
        CheckpointError: says what each rank met.
    """
    mine: str | None = None
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        mine = f"{type(error).__name__}: {error}"
    except dcp.CheckpointException as error:
        mine = _reasons(error)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    reasons = list(dict.fromkeys(reason for reason in found if reason is not None))
    if reasons:
        raise CheckpointError("; ".join(reasons))


def _reasons(error: dcp.CheckpointException) -> str:
    """What the ranks met, without their stacks; the whole error is the cause of what is raised from it."""
    return "; ".join(dict.fromkeys(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values()))


def rng_state() -> dict[str, Any]:
    """State of this process's generators, in types that load without executing code."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": {
            **numpy_state,
            "state": {"key": torch.from_numpy(inner["key"].astype(np.int64)), "pos": inner["pos"]},
        },
        "torch": torch.get_rng_state(),
        "accelerator": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Undo the draws made since `rng_state`."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    key, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    inner = {"key": key.numpy().astype(np.uint32), "pos": position}
    np.random.set_state({**numpy_state, "state": inner})
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["accelerator"])


def _optimizer_state(hf: PreTrainedModel, optimizer: Optimizer, *, with_copies: bool = False) -> dict[str, Any]:
    """The optimizer's state under the names that checkpoints have for the parameters of this stage.

    Args:
        hf: the model, or a pipeline stage of it.
        optimizer: of its parameters.
        with_copies: also the state of parameters that an earlier stage holds too.
    """
    state: dict[str, Any] = dict(get_optimizer_state_dict(hf, optimizer))
    stage = stage_of(hf)
    if stage is None:
        return state
    state = _renamed(state, stage.renamed)
    if not with_copies:
        state["state"] = {name: value for name, value in state["state"].items() if name not in stage.copies}
        for group in state["param_groups"]:
            group["params"] = [name for name in group["params"] if name not in stage.copies]
    return state


def _renamed(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """An optimizer's state with other names for some parameters."""
    return {
        "state": {names.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            group | {"params": [names.get(name, name) for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _rng_file(path: Path) -> Path:
    return path / "rng" / f"rank_{dist.get_rank():05d}.pt"


def _file_numbers(num_bytes: dict[str, int]) -> dict[str, int]:
    """Number the output file of each weight, filling files in order up to MAX_FILE_BYTES."""
    numbers, number, filled = {}, 1, 0
    for name, size in num_bytes.items():
        if filled and filled + size > MAX_FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers
