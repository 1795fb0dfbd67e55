"""Write and read the weights and the training state of a Megatron Core model.

All ranks together write this layout (W = weights folder, O = optimizer folder):

    W/iter_0000000/                torch_dist: one undivided tensor for each parameter of the whole model
    W/config.json                  configuration of the Hugging Face model
    O/optim/                       torch_dist: moments and float32 weights under parameter names
    O/trainer.pt                   number of updates, position of the schedule, loss scale
    O/rng/rank_<r>.pt              random-number generators of each rank

Invariant: a load restores every bit that a save wrote, on any mesh. Random-number states are restored only on the same
mesh. If one rank cannot write or read, all ranks raise an error. The caller makes writing atomic.

The optimizer state is saved as named parts of whole tensors. A moment has the name of its parameter in every kind of
optimizer, so that optimizers on other meshes, chained or not, distributed or not, can read it. Hyperparameters are not
saved. They come from the configuration, and the schedule continues as if the run had used them from its start.

Invariant: after a load each parameter has its own step tensor. torch's Adam increments this tensor in place, so a
tensor shared by several parameters would silently be incremented several times per update.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.megatron.checkpoints import ITERATION, torch_dist
from nemo_rl.models.megatron.checkpoints.torch_dist import CONTENT, Sharded
from nemo_rl.models.megatron.model.build import unwrap
from nemo_rl.models.megatron.optimizer import parts_of
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is, restore_rng_state, rng_file, rng_state
from nemo_rl.utils.errors import CheckpointError

_MASTER, _DISTRIBUTED_MASTER = "optimizer.state.fp32_param.", "optimizer.state.param."
_MASTERS = "fp32_from_fp16_params"
_MOMENTUM = "momentum_buffer"
_TORCH_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (_MOMENTUM,),
}
"""States that torch's optimizers keep per parameter. AdamW is a subclass of Adam."""


def is_distributed(optimizer: Any) -> bool:
    """Return whether data-parallel ranks divide the optimizer state. If so, `state_to_save` returns copies of it."""
    return any(isinstance(member, DistributedOptimizer) for member in parts_of(optimizer))


def has_state(optimizer: Any) -> bool:
    """Return whether there is optimizer state to save: after an update or a load, and always for SGD."""
    inner = [each for member in parts_of(optimizer) for each in _inner(member)]
    return any(any(each.state.values()) or isinstance(each, torch.optim.SGD) for each in inner)


def common_step(optimizer: Any) -> float | None:
    """Return the number of updates, or None if the optimizer does not count them.

    Raises:
        CheckpointError: parameters have different numbers of updates, which a checkpoint cannot store.
    """
    found: set[float] = set()
    for inner in (each for member in parts_of(optimizer) for each in _inner(member)):
        found |= {float(state["step"]) for state in inner.state.values() if "step" in state}
        found |= {float(group["step"]) for group in inner.param_groups if group.get("step")}
    if len(found) > 1:
        raise CheckpointError(f"parameters were updated {sorted(found)} times; a checkpoint holds one number for all.")
    return found.pop() if found else None


def loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """Return the state of the loss scaler for float16, or None for other dtypes."""
    scalers = [getattr(member, "grad_scaler", None) for member in parts_of(optimizer)]
    return next((scaler.state_dict() for scaler in scalers if scaler), None)


def state_to_save(optimizer: Any, model: Sharded) -> Sharded:
    """Return the optimizer state that this rank writes. The call is collective.

    Args:
        optimizer: Megatron Core's optimizer.
        model: a new result of `model_state`, with names and positions of the parameters.
    """
    return _of_members(optimizer, model, loading=False)


def state_to_load(optimizer: Any, model: Sharded) -> Sharded:
    """Return the optimizer state into which this rank reads a checkpoint. Missing states are made."""
    for member in parts_of(optimizer):
        _make_states(member)
    return _of_members(optimizer, model, loading=True)


def weights_and_masters(optimizer: Any, loaded: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a 16-bit weight of this rank and its float32 weight from the checkpoint, both of equal size.

    Args:
        optimizer: the optimizer given to `state_to_load`.
        loaded: state that was read for `state_to_load`.
    """
    for index, member in enumerate(parts_of(optimizer)):
        state = loaded.get(f"optimizer{index}", {})
        if isinstance(member, DistributedOptimizer):
            found = zip(_parameters(member), (state[number] for number in range(len(state))), strict=False)
            yield from ((weight, read["fp32_param"]) for weight, read in found if "fp32_param" in read)
        else:
            for group, read in state.get(_MASTERS, {}).items():
                yield from ((member.float16_groups[group][number], master) for number, master in read.items())


def put_back(optimizer: Any, loaded: dict[str, Any], step: float | None, scale: dict[str, Any] | None) -> None:
    """Load the state that was read for `state_to_load` into the optimizer.

    Args:
        optimizer: the optimizer given to `state_to_load`.
        loaded: the state that was read.
        step: result of `common_step`.
        scale: result of `loss_scale`.
    """
    for index, member in enumerate(parts_of(optimizer)):
        state = loaded.get(f"optimizer{index}", {})
        if isinstance(member, DistributedOptimizer):
            _put_back_distributed(member, state)
        else:
            _put_back_plain(member, state)
        if step is not None:
            for inner in _inner(member):
                _set_step(inner, step)
        if scale is not None and getattr(member, "grad_scaler", None):
            member.grad_scaler.load_state_dict(scale)


def forget(optimizer: Any) -> None:
    """Discard all moments and steps, and copy the model's current weights into the optimizer."""
    for member in parts_of(optimizer):
        for inner in (member.optimizer, *_inner(member)):
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)
    optimizer.reload_model_params()


def _inner(member: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers of a chain's member. There are several if the host updates a part of the weights."""
    inner = member.optimizer
    return list(inner.sub_optimizers) if isinstance(inner, HybridDeviceOptimizer) else [inner]


def _of_members(optimizer: Any, model: Sharded, *, loading: bool) -> Sharded:
    found = {f"optimizer{index}": _tensors(each, model, loading) for index, each in enumerate(parts_of(optimizer))}
    return {name: state for name, state in found.items() if state}


def _tensors(member: Any, model: Sharded, loading: bool) -> Sharded:
    """Return moments and float32 weights of a member, with names that do not depend on its class."""
    if not isinstance(member, DistributedOptimizer):
        state = member.sharded_state_dict(model, is_loading=False, metadata=dict(CONTENT))
        if _MASTERS in state:  # dicts, because Megatron Core drops empty list items
            state[_MASTERS] = {group: dict(enumerate(held)) for group, held in enumerate(state[_MASTERS])}
        return extract_sharded_base(state)[0]
    on_first_rank = getattr(member, "data_parallel_group_gloo", None) is not None
    metadata = {**CONTENT, "distrib_optim_fully_reshardable_mem_efficient": on_first_rank}
    states = member.sharded_param_state_fully_reshardable(model, loading, metadata) or {}
    full_precision = [parameter.dtype is torch.float32 for parameter in _parameters(member)]
    for index, state in states.items():
        if full_precision[index]:
            del state["param"]  # a float32 weight itself is in the weights folder
        else:
            master = state.pop("param")
            state["fp32_param"] = replace(master, key=master.key.replace(_DISTRIBUTED_MASTER, _MASTER, 1))
    return states


def _parameters(member: DistributedOptimizer) -> list[Tensor]:
    """Return the model's parameters in the order of Megatron Core's numbering of states."""
    return [parameter for buffer in member.buffers for parameter in buffer.param_index_map]


@torch.no_grad()
def _put_back_distributed(member: DistributedOptimizer, states: dict[int, dict[str, Tensor]]) -> None:
    for index, parameter in enumerate(_parameters(member)):
        states[index].setdefault("fp32_param", parameter.detach())
    for state in member.optimizer.state.values():
        state.pop("step", None)  # the loaded state lacks it, but Megatron Core needs it
    member.load_parameter_state_from_fully_reshardable(states)
    if isinstance(member.optimizer, HybridDeviceOptimizer):
        _keep_parts_alone(member.optimizer)


def _keep_parts_alone(inner: HybridDeviceOptimizer) -> None:
    """Replace the loaded states of each weight with copies on the weight's device.

    The loaded states are views of whole tensors, possibly on the other device. Megatron Core distinguishes host and GPU
    by the class of the optimizer, but without Transformer Engine both have the same class.
    """
    for each in inner.sub_optimizers:
        for parameter, state in each.state.items():
            state.pop("master_param", None)  # the parameter already has a copy
            state.update({name: torch.empty_like(parameter).copy_(value) for name, value in state.items()})
    inner._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def _put_back_plain(member: Any, states: Sharded) -> None:
    for group, read in states.pop(_MASTERS, {}).items():
        for index, master in read.items():
            member.fp32_from_float16_groups[group][index].copy_(master)
    parameters = [parameter for parameter, _ in _with_groups(member.optimizer)]
    for index, read in states.get("optimizer", states).get("state", {}).items():
        for name, value in read.items():
            member.optimizer.state[parameters[index]][name].copy_(value)


def _make_states(member: Any) -> None:
    """Make the states into which a checkpoint is read, if no update has made them."""
    inner = member.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        _make_states_on_both(inner)
        return
    names = next((names for kind, names in _TORCH_STATES.items() if isinstance(inner, kind)), None)
    if names is None:
        _make_foreign_states(member)
        return
    for parameter, group in _with_groups(inner):
        if group.get("momentum") == 0:
            continue
        state = inner.state[parameter]
        for name in names:
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, requires_grad=False)


def _make_states_on_both(inner: HybridDeviceOptimizer) -> None:
    """Make the states of an optimizer for two devices, without its `dummy_step`, which updates weights randomly."""
    for each in inner.sub_optimizers:
        for parameter, _ in _with_groups(each):
            for name in _TORCH_STATES[torch.optim.Adam]:
                each.state[parameter].setdefault(name, torch.zeros_like(parameter, requires_grad=False))
    inner._sync_sub_optimizers_state_to_hdo()


def _make_foreign_states(member: Any) -> None:
    """Make the states of Transformer Engine's and APEX's fused optimizers."""
    if isinstance(member, DistributedOptimizer):
        member.load_state_dict(member.state_dict())
    elif member.init_state_fn is not None:
        member.init_state_fn(member.optimizer, member.config)


def _set_step(inner: Any, step: float) -> None:
    if any(_MOMENTUM in state for state in inner.state.values()):  # SGD and Muon count no updates
        return
    if not isinstance(inner, torch.optim.Adam):
        for group in inner.param_groups:
            group["step"] = int(step)
        return
    for parameter, group in _with_groups(inner):
        on_device = group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        inner.state[parameter]["step"] = torch.tensor(step, dtype=torch.get_default_dtype(), device=device)


def _with_groups(inner: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    return ((parameter, group) for group in inner.param_groups for parameter in group["params"])


logger = logging.getLogger(__name__)

_MOMENTS, _TRAINER = "optim", "trainer.pt"
_CHECKED_VALUES = 1 << 16
"""Number of evenly spaced values that are compared in each weight. Weights of another checkpoint differ everywhere."""
_REMAINDERS = float(1 << 15)


def load(paths: CheckpointPaths, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Restore the state that the writes of `prepared` wrote. The call is collective.

    Args:
        paths: a checkpoint from any mesh; without an optimizer folder, the optimizer starts from the weights.
        chunks: as in `prepared`.
        optimizer: as in `prepared`.
        scheduler: as in `prepared`.

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
        forget(optimizer)
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
    """Yield functions that write the parts of a checkpoint. A part is prepared when its function is requested.

    Args:
        paths: folders to write; without an optimizer folder only the weights are written.
        chunks: the rank's virtual stages, wrapped or not. The gathering of their weights must have finished.
        optimizer: Megatron Core's optimizer, or None.
        scheduler: the optimizer's `OptimizerParamScheduler`, or None.
        hf_config: Hugging Face configuration of the model.
        keep: applied to every tensor that will be written.

    Yields:
        Functions that raise a CheckpointError on all ranks if a rank cannot write its files. All calls are collective.
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
        "loss_scale": loss_scale(optimizer),
    }
    if has_state:
        state = state_to_save(optimizer, model_state(chunks))
        are_copies = is_distributed(optimizer)
        yield torch_dist.prepare(paths.optimizer / _MOMENTS, state, as_it_is if are_copies else keep)
    yield partial(_write_trainer, paths.optimizer, trainer, _generators())


def _of_all_ranks(optimizer: Any) -> tuple[bool, float | None]:
    """Return whether any rank has optimizer state, and the number of updates, which may be unknown to a rank."""
    found: list[Any] = [None] * dist.get_world_size()
    with raise_on_all_ranks():
        mine = (has_state(optimizer), common_step(optimizer))
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
        wanted = state_to_load(optimizer, model_state(chunks))
        loaded = torch_dist.read(folder / _MOMENTS, wanted)
        with raise_on_all_ranks():
            _check_masters(folder, chunks, optimizer, loaded)
        put_back(optimizer, loaded, trainer["step"], trainer["loss_scale"])
    else:
        forget(optimizer)
    scheduler.num_steps = 0
    scheduler.step(increment=trainer["num_steps"])
    _restore_generators(folder)


def _check_masters(folder: Path, chunks: Sequence[Any], optimizer: Any, loaded: dict[str, Any]) -> None:
    """Check that the optimizer state's float32 weights, when rounded, equal the weights of the model."""
    names = {id(weight): name for chunk in chunks for name, weight in unwrap(chunk).named_parameters()}
    for weight, master in weights_and_masters(optimizer, loaded):
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
    """Return a sharded state dict of this rank's parts. It can be used only once, because Megatron Core changes it."""
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
    """Return the states of this rank's random generators, including Megatron Core's generators for dropout."""
    states = get_cuda_rng_tracker().get_states()
    return {
        "mesh": _mesh(),
        "process": rng_state(),
        "tracked": {
            name: state.clone() if isinstance(state, Tensor) else state.get_state() for name, state in states.items()
        },
    }


def _restore_generators(folder: Path) -> None:
    """Restore the random generators, unless the mesh has changed so that ranks hold other parts of the model."""
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
