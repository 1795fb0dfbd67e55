"""Write and read a rank's training state other than the weights: optimizer, schedule, random numbers.

All ranks together write this layout (O = optimizer folder):

    O/optim/                       torch distributed checkpoint, the state of each parameter under its name
    O/trainer.pt                   schedule, settings of optimizer and schedule, hyperparameters of the parameter
                                   groups, whether the optimizer had state
    O/rng/rank_<r>.pt              random-number generators of each rank

Invariant: if the settings of optimizer and schedule are unchanged, a load restores every bit that a save wrote, on any
number of ranks. A rank without a file keeps its random-number state.
"""

import copy
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks, reasons_of, require_readable
from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.dtensor.optimizer import OptimizerSettings, groups_now, hyperparameters_now
from nemo_rl.models.dtensor.pipeline.stages import names_here, stage_of
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is, restore_rng_state, rng_file, rng_state
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)


def prepare_training_state(
    hf: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    settings: OptimizerSettings,
    path: Path,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare to write optimizer, schedule and each rank's random-number state to `path` (O in the module docstring).

    Args:
        keep: applied to every tensor that will be written.

    Returns:
        A function that writes the files. It raises a CheckpointError on all ranks if a rank cannot write its files.
    """
    found: Any = get_optimizer_state_dict(hf, optimizer) if optimizer.state else None
    trainer = {
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "has_optimizer_state": found is not None,
        "optimizer_groups": None if found is None else [_hyperparameters(group) for group in found["param_groups"]],
        "settings": settings,
    }
    state = None if found is None else _kept(_known_states(hf, found["state"]), "optim.state", keep)
    return partial(_write_training_state, path, state, trainer, rng_state())


def _write_training_state(
    path: Path,
    state: dict[str, Any] | None,
    trainer: dict[str, Any],
    rng: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    if state is not None:
        with raise_on_all_ranks(group):
            dcp.save({"optim": {"state": state}}, checkpoint_id=str(path / "optim"), process_group=group)
    with raise_on_all_ranks(group):
        file = rng_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(rng, file)
        if dist.get_rank() == 0:
            torch.save(trainer, path / "trainer.pt")


def _kept(value: Any, name: str, keep: Keep) -> Any:
    """Copy dicts and lists, and replace each tensor with the result of `keep`."""
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
    """Restore the state that `prepare_training_state` wrote.

    If the settings have changed since the save, the optimizer gets the new hyperparameters and keeps its moments. The
    new schedule continues at the current step, as if it had been used from the start.

    Raises:
        CheckpointError: the folder is not an optimizer checkpoint, or belongs to another optimizer.
    """
    trainer_file = path / "trainer.pt"
    if not trainer_file.exists():
        raise CheckpointError(f"{path} holds no trainer.pt: not an optimizer checkpoint.")
    trainer = load_plain(trainer_file)
    saved = trainer.get("settings")
    # # The state of a schedule contains a list with one value per parameter group, and the groups depend on the meshes.
    num_groups = len(optimizer.param_groups)
    unchanged = settings == saved and len(trainer["scheduler"].get("_last_lr", range(num_groups))) == num_groups
    new_values = None if unchanged else hyperparameters_now(optimizer, scheduler, settings, trainer)
    if saved is not None and saved["optimizer"]["name"] != settings["optimizer"]["name"]:
        logger.warning("policy.optimizer.name has changed: the optimizer starts without moments.")
    elif trainer["has_optimizer_state"]:
        _load_moments(hf, optimizer, path / "optim", trainer.get("optimizer_groups"))
    if new_values is None:
        scheduler.load_state_dict(trainer["scheduler"])
    else:
        for group, values in zip(optimizer.param_groups, new_values, strict=True):
            group.update(values)
    if rng_file(path).exists():
        restore_rng_state(load_plain(rng_file(path)))
    else:
        logger.warning("%s is missing: this rank keeps its own random-number state.", rng_file(path))


def _load_moments(hf: PreTrainedModel, optimizer: Optimizer, path: Path, groups: list[dict[str, Any]] | None) -> None:
    """Read the optimizer's state of each parameter, by the parameter's name."""
    now: dict[str, Any] = dict(get_optimizer_state_dict(hf, optimizer))
    names = [group["params"] for group in now["param_groups"]]
    del now["param_groups"][1:]  # checkpoints may differ in the number of groups
    now["state"] = _known_states(hf, now["state"], with_copies=True)
    state: dict[str, Any] = {"optim": now if groups is None else {"state": now["state"]}}
    with raise_on_all_ranks():
        read_metadata(path / METADATA_FILE)
    try:
        with only_plain_values():
            dcp.load(state, checkpoint_id=str(path))
    except dcp.CheckpointException as error:
        require_readable(error)
        raise CheckpointError(
            f"{path} does not fit {type(optimizer).__name__} as policy.optimizer describes it: {reasons_of(error)}"
        ) from error
    state["optim"]["param_groups"] = groups_now(optimizer, names, groups or state["optim"]["param_groups"])
    here = names_here(hf)
    state["optim"]["state"] = {here.get(name, name): value for name, value in state["optim"]["state"].items()}
    set_optimizer_state_dict(hf, optimizer, state["optim"])


def _known_states(hf: PreTrainedModel, states: Mapping[str, Any], *, with_copies: bool = False) -> dict[str, Any]:
    """Return the optimizer's state of each parameter by the parameter's name in checkpoints."""
    stage = stage_of(hf)
    if stage is None:
        return dict(states)
    known = {stage.known_as(name): state for name, state in states.items()}
    return {name: state for name, state in known.items() if with_copies or name not in stage.copies}


def _hyperparameters(group: Any) -> dict[str, Any]:
    """Return the entries of a parameter group except the names of this rank's parameters."""
    return {name: value for name, value in group.items() if name != "params"}
