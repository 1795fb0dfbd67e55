"""State of Megatron Core's optimizers as named parts of whole tensors, and back into any of them.

A moment has the name of its parameter, whichever optimizer of a chain holds it, so that optimizers over other meshes,
chained or not, distributed or not, read it. Hyperparameters are the configuration's and the schedule's: of them only
the step is state.

Invariant: behind a load each parameter has a step tensor of its own. torch's Adam counts in place, so a tensor that
several parameters share runs ahead, and nothing says so.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from nemo_rl.models.megatron.checkpoints.torch_dist import CONTENT, Sharded
from nemo_rl.utils.errors import CheckpointError

_MASTER, _DISTRIBUTED_MASTER = "optimizer.state.fp32_param.", "optimizer.state.param."
_MASTERS = "fp32_from_fp16_params"
_TORCH_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""What torch's optimizers keep of each parameter, AdamW's being Adam's; other libraries' make their own states."""


def members(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that have parameters on this rank; the optimizer itself where it is none."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in chain if not getattr(member, "is_stub_optimizer", False)]


def is_distributed(optimizer: Any) -> bool:
    """Whether data-parallel ranks divide the state; what `state_to_save` returns is copies then."""
    return any(isinstance(member, DistributedOptimizer) for member in members(optimizer))


def has_state(optimizer: Any) -> bool:
    """Whether there is more to save than the weights: an update was made, or loaded, or nothing tells."""
    inner = [each for member in members(optimizer) for each in _inner(member)]
    return any(any(each.state.values()) or isinstance(each, torch.optim.SGD) for each in inner)


def common_step(optimizer: Any) -> float | None:
    """Updates made; None where the optimizer does not count them.

    Raises:
        CheckpointError: parameters differ in it, so that a checkpoint could not hold it.
    """
    found: set[float] = set()
    for inner in (each for member in members(optimizer) for each in _inner(member)):
        found |= {float(state["step"]) for state in inner.state.values() if "step" in state}
        found |= {float(group["step"]) for group in inner.param_groups if group.get("step")}
    if len(found) > 1:
        raise CheckpointError(f"parameters were updated {sorted(found)} times; a checkpoint holds one number for all.")
    return found.pop() if found else None


def loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """State of the loss scale of float16; None in other formats."""
    scalers = [getattr(member, "grad_scaler", None) for member in members(optimizer)]
    return next((scaler.state_dict() for scaler in scalers if scaler), None)


def state_to_save(optimizer: Any, model: Sharded) -> Sharded:
    """What this rank writes of the optimizer; collective.

    Args:
        optimizer: Megatron Core's.
        model: fresh sharded state of the model, which tells names and places.
    """
    return _of_members(optimizer, model, loading=False)


def state_to_load(optimizer: Any, model: Sharded) -> Sharded:
    """Where on this rank what of a checkpoint goes; makes the states that are missing."""
    for member in members(optimizer):
        _make_states(member)
    return _of_members(optimizer, model, loading=True)


def weights_and_masters(optimizer: Any, loaded: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The 16-bit weights of this rank, each with the float32 weight that was read for it, of equal numbers of elements.

    Args:
        optimizer: the one that was asked.
        loaded: what was read for `state_to_load`.
    """
    for index, member in enumerate(members(optimizer)):
        state = loaded.get(f"optimizer{index}", {})
        if isinstance(member, DistributedOptimizer):
            found = zip(_parameters(member), (state[number] for number in range(len(state))), strict=False)
            yield from ((weight, read["fp32_param"]) for weight, read in found if "fp32_param" in read)
        else:
            for group, read in state.get(_MASTERS, {}).items():
                yield from ((member.float16_groups[group][number], master) for number, master in read.items())


def put_back(optimizer: Any, loaded: dict[str, Any], step: float | None, scale: dict[str, Any] | None) -> None:
    """Take over what was read for `state_to_load`.

    Args:
        optimizer: the one that was asked.
        loaded: what was read.
        step: from `common_step`.
        scale: from `loss_scale`.
    """
    for index, member in enumerate(members(optimizer)):
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
    """Start without moments from the weights that the model has."""
    for member in members(optimizer):
        for inner in (member.optimizer, *_inner(member)):
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)
    optimizer.reload_model_params()


def _inner(member: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that update; one for each device where those of the host have a part."""
    inner = member.optimizer
    return list(inner.sub_optimizers) if isinstance(inner, HybridDeviceOptimizer) else [inner]


def _of_members(optimizer: Any, model: Sharded, *, loading: bool) -> Sharded:
    found = {f"optimizer{index}": _tensors(each, model, loading) for index, each in enumerate(members(optimizer))}
    return {name: state for name, state in found.items() if state}


def _tensors(member: Any, model: Sharded, loading: bool) -> Sharded:
    """Moments and float32 weights of a member, under names that do not tell its kind."""
    if not isinstance(member, DistributedOptimizer):
        state = member.sharded_state_dict(model, is_loading=False, metadata=dict(CONTENT))
        if _MASTERS in state:  # lists would lose their empty places
            state[_MASTERS] = {group: dict(enumerate(held)) for group, held in enumerate(state[_MASTERS])}
        return extract_sharded_base(state)[0]
    on_first_rank = getattr(member, "data_parallel_group_gloo", None) is not None
    metadata = {**CONTENT, "distrib_optim_fully_reshardable_mem_efficient": on_first_rank}
    states = member.sharded_param_state_fully_reshardable(model, loading, metadata) or {}
    full_precision = [parameter.dtype is torch.float32 for parameter in _parameters(member)]
    for index, state in states.items():
        if full_precision[index]:
            del state["param"]  # the weight itself
        else:
            master = state.pop("param")
            state["fp32_param"] = replace(master, key=master.key.replace(_DISTRIBUTED_MASTER, _MASTER, 1))
    return states


def _parameters(member: DistributedOptimizer) -> list[Tensor]:
    """The model's parameters in the order in which Megatron Core numbers their states."""
    return [parameter for buffer in member.buffers for parameter in buffer.param_index_map]


@torch.no_grad()
def _put_back_distributed(member: DistributedOptimizer, states: dict[int, dict[str, Tensor]]) -> None:
    for index, parameter in enumerate(_parameters(member)):
        states[index].setdefault("fp32_param", parameter.detach())
    for state in member.optimizer.state.values():
        state.pop("step", None)  # Megatron Core looks for it among what was read, and does not find it
    member.load_parameter_state_from_fully_reshardable(states)
    if isinstance(member.optimizer, HybridDeviceOptimizer):
        _keep_parts_alone(member.optimizer)


def _keep_parts_alone(inner: HybridDeviceOptimizer) -> None:
    """Give each weight states of its own on its device.

    What was read are views of whole tensors, and Megatron Core tells devices apart by classes of optimizers, which are
    the same without Transformer Engine.
    """
    for each in inner.sub_optimizers:
        for parameter, state in each.state.items():
            state.pop("master_param", None)  # has been copied into the parameter
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
    """States for what is read, where no update has made them."""
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
    """Those of an optimizer for two devices, which its own `dummy_step` would make by an update at random."""
    for each in inner.sub_optimizers:
        for parameter, _ in _with_groups(each):
            for name in _TORCH_STATES[torch.optim.Adam]:
                each.state[parameter].setdefault(name, torch.zeros_like(parameter, requires_grad=False))
    inner._sync_sub_optimizers_state_to_hdo()


def _make_foreign_states(member: Any) -> None:
    """Those of Transformer Engine's and apex's fused optimizers."""
    if isinstance(member, DistributedOptimizer):
        member.load_state_dict(member.state_dict())
    elif member.init_state_fn is not None:
        member.init_state_fn(member.optimizer, member.config)


def _set_step(inner: Any, step: float) -> None:
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
