"""Optimizer, learning-rate schedule and gradient clipping.

Used by `models.policy.workers.dtensor_worker`. Law: the gradient norm is the norm of the whole
model's gradient, whichever meshes its parameters live on.
"""

import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl.config import OptimizerConfig
from nemo_rl.utils.errors import ConfigError


def resolve_class(dotted_name: str, key: str) -> type:
    """Import `package.module.Class`.

    Args:
        dotted_name: where the class is.
        key: the configuration key it came from, for the error message.

    Raises:
        ConfigError: the module or the class does not exist.
    """
    module_name, _, class_name = dotted_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={dotted_name!r} cannot be imported ({error}). "
            "Give the dotted path of a class, for example torch.optim.AdamW."
        ) from error


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """The optimizer named by `policy.optimizer`.

    Raises:
        ConfigError: the class cannot be imported or refuses its kwargs.
    """
    cls = resolve_class(config.name, "policy.optimizer.name")
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        return cls(trainable, **config.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.optimizer.kwargs do not fit {config.name}: {error}") from error


def build_scheduler(optimizer: Optimizer, config: Any) -> LRScheduler | None:
    """The learning-rate schedule of `policy.scheduler`; it advances once per training step.

    Three shapes are allowed: null; one `{name, kwargs}`; a list of `{name, kwargs}` closed by one
    `{milestones: [...]}`, with one milestone fewer than schedules, which runs them one after another.

    Args:
        optimizer: whose learning rate to drive.
        config: the typed section.

    Raises:
        ConfigError: the list has no milestones, or not one fewer than schedules.
    """
    if config is None:
        return None
    entries = list(config) if isinstance(config, Sequence) else [config]
    milestones = [list(entry.milestones) for entry in entries if hasattr(entry, "milestones")]
    stages = [_single_scheduler(optimizer, entry) for entry in entries if hasattr(entry, "name")]
    if not stages:
        return None
    if len(stages) == 1 and not milestones:
        return stages[0]
    if len(milestones) != 1 or len(milestones[0]) != len(stages) - 1:
        raise ConfigError(
            f"policy.scheduler lists {len(stages)} schedules with milestones {milestones}: "
            f"end the list with one `milestones` entry of {len(stages) - 1} step numbers."
        )
    return SequentialLR(optimizer, stages, milestones=milestones[0])


def _single_scheduler(optimizer: Optimizer, entry: Any) -> LRScheduler:
    cls = resolve_class(entry.name, "policy.scheduler.name")
    try:
        return cls(optimizer, **entry.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.scheduler.kwargs do not fit {entry.name}: {error}") from error


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`.

    All ranks must call this together.

    Args:
        parameters: the model's parameters; those without a gradient are skipped.
        max_norm: None or 0 only measures.

    Returns:
        The norm before clipping.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = total_norm(gradients)
    value = norm.item()
    if max_norm and value > max_norm:
        scale = max_norm / (value + 1e-6)
        for gradient in gradients:
            gradient.mul_(scale)
    return value


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The joint 2-norm of gradients on any mix of meshes, as a plain float32 scalar.

    Each rank squares its own shards; the sums are reduced over the mesh axes that shard them. So
    gradients may be plain tensors or DTensors, on any meshes, in host or device memory.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and whoever only checks a class has no gradient

    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups[layout].append(gradient)
    squares = [_square_sum(group) for group in groups.values()]
    return sum(squares[1:], squares[0].clone()).sqrt()


def _square_sum(group: list[Tensor]) -> Tensor:
    """Sum of squares over all ranks, of gradients that share mesh and placements."""
    from torch.distributed.tensor import DTensor

    first = group[0]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in group]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in local]
    total = torch.stack(norms).square().sum()
    if isinstance(first, DTensor):
        total = total.to(first.device_mesh.device_type)
        for axis, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(total, group=first.device_mesh.get_group(axis))
    return total
