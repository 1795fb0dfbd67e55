"""Write and read the training state of a model of Megatron Core.

Layout (W = weights folder, O = optimizer folder), written by all ranks together:

    W/iter_0000000/                torch_dist: one undivided tensor for each parameter of the whole model
    W/config.json                  configuration of the Hugging Face model
    O/optim/                       torch_dist: moments and float32 weights under parameter names
    O/trainer.pt                   number of updates, position of the schedule, loss scale
    O/rng/rank_<r>.pt              random-number generators of each rank

Invariant: a load restores every bit that a save wrote, on any mesh (random-number state only on the same one).
Hyperparameters come from the configuration, and the schedule continues as if they had been used from the first step.
If one rank cannot write or read, all ranks raise. The caller makes writing atomic.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.megatron.build import unwrap
from nemo_rl.models.megatron.checkpoints import ITERATION, optimizer_state, torch_dist
from nemo_rl.models.megatron.checkpoints.torch_dist import CONTENT, Sharded
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.models.training.random_state import restore_rng_state, rng_file, rng_state
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

_MOMENTS, _TRAINER = "optim", "trainer.pt"
_CHECKED_VALUES = 1 << 16
"""Values that are compared per weight, evenly spaced; a tensor of another checkpoint differs everywhere."""
_REMAINDERS = float(1 << 15)


def load(paths: CheckpointPaths, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Restore the state that the writes of `prepared` wrote; collective.

    Args:
        paths: a checkpoint of any mesh; without an optimizer folder the optimizer starts from the weights.
        chunks: see `prepared`.
        optimizer: see `prepared`.
        scheduler: see `prepared`.

    Raises:
        CheckpointError: raised on all ranks if the checkpoint is damaged, incomplete, or of another model.
    """
    bare = [unwrap(chunk) for chunk in chunks]
    loaded = torch_dist.read(paths.weights / ITERATION, model_state(chunks))
    for index, chunk in enumerate(bare):
        chunk.load_state_dict(loaded[f"model{index}"])
    if optimizer is None:
        return
    if paths.optimizer is None:
        optimizer_state.forget(optimizer)
        return
    _load_training_state(paths.optimizer, chunks, optimizer, scheduler)


def prepared(
    paths: CheckpointPaths,
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    hf_config: PretrainedConfig,
    keep: Keep = as_it_is,
) -> Iterator[Write]:
    """Yield the writes of a checkpoint's parts; each part is prepared when the iterator reaches it; collective.

    Args:
        paths: folders to write; without an optimizer folder only the weights are written.
        chunks: the rank's virtual stages, wrapped or not; their weights are complete (no gathering is outstanding).
        optimizer: Megatron Core's optimizer, or None.
        scheduler: its `OptimizerParamScheduler`, or None.
        hf_config: Hugging Face configuration of the model.
        keep: applied to every tensor that will be written.

    Yields:
        Functions that raise a CheckpointError on all ranks if one of them cannot write.
    """
    yield torch_dist.prepare(paths.weights / ITERATION, model_state(chunks), keep)
    yield partial(_write_config, paths.weights, hf_config)
    if paths.optimizer is None:
        return
    has_state, step = _of_all_ranks(optimizer)
    trainer = {
        "optimizer": optimizer.config.optimizer,
        "has_state": has_state,
        "step": step,
        "num_steps": scheduler.num_steps,
        "loss_scale": optimizer_state.loss_scale(optimizer),
    }
    if has_state:
        state = optimizer_state.state_to_save(optimizer, model_state(chunks))
        are_copies = optimizer_state.is_distributed(optimizer)
        yield torch_dist.prepare(paths.optimizer / _MOMENTS, state, as_it_is if are_copies else keep)
    yield partial(_write_trainer, paths.optimizer, trainer, _generators())


def _of_all_ranks(optimizer: Any) -> tuple[bool, float | None]:
    """Return whether any rank has optimizer state, and the step; a rank may hold no trained parameter."""
    found: list[Any] = [None] * dist.get_world_size()
    with raise_on_all_ranks():
        mine = (optimizer_state.has_state(optimizer), optimizer_state.common_step(optimizer))
    dist.all_gather_object(found, mine)
    return any(has_state for has_state, _ in found), next((step for _, step in found if step is not None), None)


def _write_config(folder: Path, config: PretrainedConfig, group: dist.ProcessGroup | None = None) -> None:
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            config.save_pretrained(folder)


def _write_trainer(
    folder: Path, trainer: dict[str, Any], generators: dict[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    with raise_on_all_ranks(group):
        file = rng_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(generators, file)
        if dist.get_rank() == 0:
            torch.save(trainer, folder / _TRAINER)


def _load_training_state(folder: Path, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    with raise_on_all_ranks():
        if not (folder / _TRAINER).exists():
            raise CheckpointError(f"{folder} holds no {_TRAINER}: not an optimizer checkpoint of this backend.")
        trainer = load_plain(folder / _TRAINER)
    name = optimizer.config.optimizer
    if trainer["optimizer"] != name:
        logger.warning("The optimizer changed from %s to %s: it starts without moments.", trainer["optimizer"], name)
    if trainer["has_state"] and trainer["optimizer"] == name:
        wanted = optimizer_state.state_to_load(optimizer, model_state(chunks))
        loaded = torch_dist.read(folder / _MOMENTS, wanted)
        with raise_on_all_ranks():
            _check_masters(folder, chunks, optimizer, loaded)
        optimizer_state.put_back(optimizer, loaded, trainer["step"], trainer["loss_scale"])
    else:
        optimizer_state.forget(optimizer)
    scheduler.num_steps = 0
    scheduler.step(increment=trainer["num_steps"])
    _restore_generators(folder)


def _check_masters(folder: Path, chunks: Sequence[Any], optimizer: Any, loaded: dict[str, Any]) -> None:
    """Check that the loaded float32 weights, rounded, are the weights of the model.

    Raises:
        CheckpointError: the weights differ; without this check a run would silently continue from wrong weights.
    """
    names = {id(weight): name for chunk in chunks for name, weight in unwrap(chunk).named_parameters()}
    for weight, master in optimizer_state.weights_and_masters(optimizer, loaded):
        every = max(1, weight.numel() // _CHECKED_VALUES)
        rounded, read = (tensor.detach().flatten()[::every].cpu().float() for tensor in (weight, master))
        limit = torch.finfo(weight.dtype).eps * rounded.abs() + torch.finfo(torch.float16).tiny
        if not ((read - rounded).abs() > limit).any():
            continue
        given = f"{folder / _MOMENTS} has float32 weights of {names.get(id(weight), 'a parameter')} that "
        if torch.equal(read, read.round()) and read.abs().max() <= _REMAINDERS:
            given += (
                "are the integers which Transformer Engine's Adam keeps next to bfloat16 weights (the lower 16 bits of "
                "each float32 weight). This checkpoint was written by a version of this library that saved them so. "
            )
        else:
            given += "are not those of the weights folder: one of the two folders is of another checkpoint. "
        raise CheckpointError(
            f"{given}Remove {folder}, and start again with checkpointing.allow_changed=[policy.optimizer] to continue "
            "from the weights with a new optimizer state."
        )


def model_state(chunks: Sequence[Any]) -> Sharded:
    """Return the sharded state dict of this rank's parts; Megatron Core changes it, so make a new one for each use."""
    return {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=dict(CONTENT)) for index, chunk in enumerate(chunks)
    }


def _mesh() -> list[int]:
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        dist.get_world_size(),
    )
    return [size or 1 for size in sizes]


def _generators() -> dict[str, Any]:
    """Return the state of this rank's random generators, including Megatron Core's generators for dropout."""
    states = get_cuda_rng_tracker().get_states()
    return {
        "mesh": _mesh(),
        "process": rng_state(),
        "tracked": {
            name: state.clone() if isinstance(state, Tensor) else state.get_state() for name, state in states.items()
        },
    }


def _restore_generators(folder: Path) -> None:
    """Restore the random generators if the mesh is the saved one; on other meshes the ranks hold other parts."""
    file = rng_file(folder)
    saved = load_plain(file) if file.exists() else None
    if saved is None or saved["mesh"] != _mesh():
        logger.warning("%s is missing or of another mesh: this rank keeps its own random-number state.", file)
        return
    restore_rng_state(saved["process"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in saved["tracked"].items():
        if isinstance(states.get(name), Tensor):
            states[name] = state
        elif name in states:
            states[name].set_state(state)
    tracker.set_states(states)
