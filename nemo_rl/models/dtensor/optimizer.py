"""Build the optimizer and the learning-rate schedule, and clip gradients.

`hidden_matrices` decides which parameters Muon updates. AdamW updates the others.

Invariants: the gradient norm is the norm of the whole model's gradient, on any meshes. The decision depends on the
whole model only, so it is the same on every mesh.
"""

import inspect
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR

from nemo_rl.config import OptimizerConfig, PolicyConfig, SchedulerConfig, SchedulerMilestones
from nemo_rl.config.schema.model.policy import SchedulerList
from nemo_rl.models.training.muon import ORTHOGONAL, Muon
from nemo_rl.utils.errors import ConfigError, did_you_mean
from nemo_rl.utils.imports import import_dotted

logger = logging.getLogger(__name__)

type SumOverStages = Callable[[Tensor], Tensor]
"""Function that sums a number over the stages of a pipeline."""
type OptimizerSettings = dict[str, Any]
"""`policy.optimizer` and `policy.scheduler` as plain values."""

_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "base_momentum", "max_momentum")
"""Keys that torch's schedules write into an optimizer's parameter groups."""

_IMPLEMENTATION = ("foreach", "fused")
"""Arguments that change only the speed of a torch optimizer, not its result."""
_FUSED_FOR_DTENSORS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused implementation accepts sharded parameters."""

_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""Errors by which classes refuse their arguments."""

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    section: str = "policy",
    matrices: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Build the optimizer of a model's section, with one parameter group per mesh.

    All groups have the same settings, except that Muon has groups of matrices and of other parameters. Separate groups
    are needed because the foreach and fused implementations compute many tensors in one call, and accept only tensors
    of one mesh in a call. `torch.optim.Muon` is replaced by `models.training.muon.Muon`.

    The fused implementation is used if the class has one and the kwargs do not choose an implementation. On GPUs, torch
    would otherwise use foreach, which needs temporary memory as large as the parameters. On CPUs, torch would update
    one tensor after another in many operations, which take 6 times as long.

    Args:
        parameters: all parameters of the model.
        config: `optimizer` of the section.
        section: name of the section, for messages.
        matrices: the parameters that Muon updates (`hidden_matrices`). Other optimizers do not use them.

    Raises:
        ConfigError: the class cannot be imported or refuses its kwargs.
    """
    cls = _named_class(config, f"{section}.optimizer.name")
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    kwargs = dict(config.kwargs)
    if cls is Muon:
        kwargs["adamw"] = _with_implementation(torch.optim.AdamW, kwargs.get("adamw") or {}, trainable)
        groups: Any = _groups_of_muon(trainable, matrices)
    else:
        kwargs = _with_implementation(cls, kwargs, trainable)
        groups = _groups_by_mesh(trainable)
    try:
        made = cls(groups, **kwargs)
    except _REFUSALS as error:
        raise ConfigError(f"{section}.optimizer.kwargs do not fit {config.name}: {error}") from error
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"{section}.optimizer.name={config.name!r} makes {made!r}, which is not a torch.optim.Optimizer."
        )
    return made


def one_tensor_at_a_time(config: OptimizerConfig, section: str = "policy") -> OptimizerConfig:
    """Return settings with which torch updates one tensor after another, unless they choose an implementation.

    On CPUs, the fused kernels compute the elements after a tensor's last whole vector with other last bits.
    """
    cls = _named_class(config, f"{section}.optimizer.name")
    if config.kwargs.keys() & {*_IMPLEMENTATION} or "fused" not in inspect.signature(cls).parameters:
        return config
    return config.model_copy(update={"kwargs": {**config.kwargs, "foreach": False, "fused": False}})


def _with_implementation(cls: Any, kwargs: Mapping[str, Any], trainable: list[nn.Parameter]) -> dict[str, Any]:
    """Return arguments that choose the fused implementation, if the class has one and they choose none."""
    chosen = kwargs.keys() & {*_IMPLEMENTATION}
    fuses = not chosen and "fused" in inspect.signature(cls).parameters and _may_fuse(cls, trainable)
    return {**kwargs, "fused": True} if fuses else dict(kwargs)


def _groups_of_muon(trainable: list[nn.Parameter], matrices: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    chosen = {id(parameter) for parameter in matrices}
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in trainable:
        parts[id(parameter) in chosen].append(parameter)
    return [
        {"params": group, ORTHOGONAL: orthogonal}
        for orthogonal, part in parts.items()
        for group in _by_mesh(part).values()
    ]


def hidden_matrices(hf: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon updates: weights of linear layers and of experts.

    Embeddings, the output head or scalar head, routers, norms, biases, convolutions and matrices with a single row or
    column are left to AdamW. The sources of `models.training.muon` do not mention routers. A weight of several layers
    (queries, keys and values, or gate and up projection) is one matrix, and so is each expert's.

    Args:
        hf: the whole model, before it is divided into stages or among ranks.

    Raises:
        ConfigError: the model trains no such parameter.
    """
    from transformers.pytorch_utils import Conv1D  # slow to import, and not needed by `check_optimizer`

    from nemo_rl.models.dtensor.expert_parallel import find_experts
    from nemo_rl.models.dtensor.routers import find_routers

    modules, fused = dict(hf.named_modules()), find_experts(hf)
    experts = [name for name in modules if name.rpartition(".")[2] == "experts" or name in fused]
    head: Any = hf.get_output_embeddings
    others = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    others += [each for each in (head(), modules.get("score"), *find_routers(hf, experts)) if each is not None]
    left = {id(parameter) for module in others for parameter in module.parameters()}
    weights = [weight for name in experts for weight in modules[name].parameters(recurse=False) if weight.dim() == 3]
    weights += [module.weight for module in modules.values() if isinstance(module, nn.Linear | Conv1D)]
    chosen = {id(weight) for weight in weights if min(weight.shape[-2:]) > 1} - left
    named = {name: weight for name, weight in hf.named_parameters() if weight.requires_grad}
    found = frozenset(name for name, weight in named.items() if id(weight) in chosen)
    if not found:
        raise ConfigError(
            f"torch.optim.Muon updates weights of linear layers and experts, and {type(hf).__name__} trains none. Use "
            "torch.optim.AdamW."
        )
    sizes = [sum(named[name].numel() for name in names) for names in (found, named)]
    logger.info(
        "Muon updates %d of %d parameters, with %.4g of %.4g million weights; AdamW updates the others.",
        *(len(found), len(named), sizes[0] / 1e6, sizes[1] / 1e6),
    )
    return found


def _groups_by_mesh(parameters: list[nn.Parameter]) -> list[nn.Parameter] | list[dict[str, Any]]:
    groups = _by_mesh(parameters)
    return parameters if len(groups) < 2 else [{"params": group} for group in groups.values()]


def _by_mesh(parameters: list[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return groups


def build_scheduler(
    optimizer: Optimizer, config: SchedulerList | SchedulerConfig | None, section: str = "policy"
) -> LRScheduler:
    """Build the learning-rate schedule of a model's section, which advances once per training step.

    Without a schedule, the rate is constant. The schedules of a list run one after another, each up to its milestone.

    Raises:
        ConfigError: a class cannot be imported or refuses its kwargs, or milestones do not fit the schedules.
    """
    if config is None:
        return ConstantLR(optimizer, factor=1.0, total_iters=0)
    stages = [_single_scheduler(optimizer, entry, section) for entry in _schedules(config)]
    if isinstance(config, SchedulerConfig) or len(stages) == 1:
        return stages[0]
    milestones = [step for entry in config if isinstance(entry, SchedulerMilestones) for step in entry.milestones]
    try:
        return SequentialLR(optimizer, stages, milestones=milestones)
    except ValueError as error:
        raise ConfigError(f"{section}.scheduler: {error}") from error


def check_optimizer(policy: PolicyConfig, section: str) -> None:
    """Build optimizer and schedule and take a step with two parameters, to find errors before ranks start.

    Args:
        policy: section of the model; nothing is checked if it has no optimizer or is not trained.
        section: name of the section, for messages.

    Raises:
        ConfigError: a dotted path names no class, or a class does not take its arguments.
    """
    if policy.optimizer is None or not policy.trains:
        return
    _check_names(policy.optimizer, f"{section}.optimizer")
    for entry in _schedules(policy.scheduler):
        _check_names(entry, f"{section}.scheduler")
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer([matrix, vector], policy.optimizer, section, [matrix])
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    scheduler = build_scheduler(optimizer, policy.scheduler, section)
    if len({*rates}) > len({group["lr"] for group in optimizer.param_groups} - {0.0}) == 1:
        raise ConfigError(
            f"{section}.scheduler gives one learning rate to all parameters, but Muon and AdamW start with {rates}. "
            "Use a schedule of factors, for example torch.optim.lr_scheduler.LinearLR."
        )
    for parameter in (matrix, vector):
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
        scheduler.step()
    except _REFUSALS as error:
        raise ConfigError(
            f"{section}.optimizer.name={policy.optimizer.name!r} cannot take a step with {section}.optimizer.kwargs="
            f"{policy.optimizer.kwargs} and {section}.scheduler: {type(error).__name__}: {error}"
        ) from error


def _check_names(entry: OptimizerConfig | SchedulerConfig, key: str) -> None:
    """Refuse arguments that a class does not have, and non-finite numbers."""
    cls = _named_class(entry, f"{key}.name")
    if cls is Muon and (other := entry.kwargs.get("adamw")) is not None:
        if not isinstance(other, Mapping):
            raise ConfigError(f"{key}.kwargs.adamw={other!r} is not a mapping of arguments of torch.optim.AdamW.")
        _check_arguments(torch.optim.AdamW, "torch.optim.AdamW", other, f"{key}.kwargs.adamw")
    _check_arguments(cls, entry.name, entry.kwargs, f"{key}.kwargs")


def _check_arguments(cls: Any, class_name: str, kwargs: Mapping[str, Any], key: str) -> None:
    try:
        parameters = dict(inspect.signature(cls).parameters)
    except (TypeError, ValueError):  # not a class, or a class written in C
        return
    if cls is Muon:  # which passes further arguments on
        parameters = {**inspect.signature(torch.optim.Muon).parameters, **parameters}
    names = [name for name, each in parameters.items() if each.kind not in _VARIABLE][1:]
    takes_any = cls is not Muon and any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, value in kwargs.items():
        if name not in names and not takes_any:
            near = did_you_mean(name, names)
            if cls is Muon and name in inspect.signature(torch.optim.AdamW).parameters:
                near = f" It is an argument of AdamW: write {key}.adamw.{name}."
            taken = f"It takes: {', '.join(names)}."
            raise ConfigError(f"{key} do not fit {class_name}: it has no argument {name}.{near} {taken}")
        default = parameters[name].default if name in parameters else None
        if problem := _unlike(value, default):
            given = f"{name}={value!r} {problem}"
            raise ConfigError(f"{key} do not fit {class_name}: {given}. Its default is {default!r}.")


def _unlike(value: Any, default: Any) -> str:
    """Return why an argument is wrong, judged by the type of its default, or an empty text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite"
    if isinstance(default, int | float) and not isinstance(default, bool) and isinstance(value, str | list | dict):
        return "is not a number"
    if isinstance(default, tuple) and not (isinstance(value, list | tuple) and len(value) == len(default)):
        return f"is not a list of {len(default)} numbers"
    return ""


def _schedules(config: SchedulerList | SchedulerConfig | None) -> list[SchedulerConfig]:
    entries = config if isinstance(config, list) else [config]
    return [entry for entry in entries if isinstance(entry, SchedulerConfig)]


def _single_scheduler(optimizer: Optimizer, entry: SchedulerConfig, section: str) -> LRScheduler:
    cls = _named_class(entry, f"{section}.scheduler.name")
    try:
        return cls(optimizer, **entry.kwargs)
    except _REFUSALS as error:
        raise ConfigError(f"{section}.scheduler.kwargs do not fit {entry.name}: {error}") from error


def _named_class(entry: OptimizerConfig | SchedulerConfig, key: str) -> Any:
    advice = "Give the dotted path of a class, for example torch.optim.AdamW."
    found = import_dotted(entry.name, ConfigError, f"{key}={entry.name!r}", advice)
    if not callable(found):
        raise ConfigError(f"{key}={entry.name!r} is not a class. {advice}")
    return Muon if found is torch.optim.Muon else found


def optimizer_settings(config: PolicyConfig) -> OptimizerSettings:
    """Return the settings from which a policy's optimizer and schedule are built."""
    return config.model_dump(mode="json", include={"optimizer", "scheduler"})


def _may_fuse(cls: Any, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether torch has a fused implementation for these parameters. For DTensors, only that of Adam exists."""
    from torch.distributed.tensor import DTensor  # slow to import, and not needed by `check_optimizer`

    if any(isinstance(parameter, DTensor) for parameter in parameters) and cls not in _FUSED_FOR_DTENSORS:
        return False
    return all(parameter.is_cuda or parameter.is_cpu for parameter in parameters)


def groups_now(
    optimizer: Optimizer, names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Convert a saved state's parameter groups to those of this optimizer, which may use other meshes or devices.

    Args:
        optimizer: has one group for each mesh, all with the same settings. Muon has further groups for AdamW.
        names: parameter names of each of the optimizer's groups.
        saved: groups of the saved state. All groups that Muon updates have the same settings, and so have all others.
    """
    of_kind = {group.get(ORTHOGONAL): group for group in reversed(saved)}
    return [
        {
            **of_kind.get(group.get(ORTHOGONAL), group),
            "params": list(own),
            **{name: group[name] for name in _IMPLEMENTATION if name in group},
        }
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]


def hyperparameters_now(
    optimizer: Optimizer, scheduler: LRScheduler, settings: OptimizerSettings, saved: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return each group's hyperparameters as if the whole run had used the current settings.

    The new schedule is advanced to the saved step, because a schedule depends only on the number of steps.

    Args:
        optimizer: the optimizer built from the settings, before it loads a state.
        scheduler: the schedule of this optimizer, before its first step.
        saved: state of the `scheduler` and `settings` of the run to resume; each may be None.

    Returns:
        For each group, the arguments that have changed and the values that the schedule sets.
    """
    schedule, before = saved["scheduler"] or {}, saved.get("settings") or {"optimizer": {"kwargs": {}}}
    with warnings.catch_warnings():
        # torch warns about steps of a schedule without an update in between, and SequentialLR causes a warning itself.
        warnings.simplefilter("ignore")
        for _ in range(schedule.get("last_epoch", 0) - scheduler.last_epoch):
            scheduler.step()
    old, new = (_flat(each["optimizer"]["kwargs"]) for each in (before, settings))
    changed = {name for name in (*old, *new) if old.get(name) != new.get(name)}
    return [
        {name: value for name, value in group.items() if name in changed or name in _SCHEDULED}
        for group in optimizer.param_groups
    ]


def _flat(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's arguments, with those that Muon passes to AdamW under their own names too."""
    return {**kwargs, **{name: (value, kwargs.get(name)) for name, value in (kwargs.get("adamw") or {}).items()}}


_TRIED_PARTS = (1, 7, 22, 33, 64)
"""Numbers of elements of parts of a parameter, most of which are no whole vectors of a processor."""


def require_element_by_element(config: OptimizerConfig, section: str = "policy") -> None:
    """Check that an optimizer gives an element the same bits in a part of a parameter as in the whole one.

    Raises:
        ConfigError: the optimizer uses other elements, or its kernels depend on the place of an element.
    """
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(sum(_TRIED_PARTS), generator=generator) for _ in range(3))
    updated = []
    for sizes in ([len(values)], list(_TRIED_PARTS)):
        parameters = [nn.Parameter(part.clone()) for part in values.split(sizes)]
        optimizer = build_optimizer(parameters, one_tensor_at_a_time(config, section), section)
        for gradient in gradients:
            for parameter, part in zip(parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        updated.append(torch.cat([parameter.detach() for parameter in parameters]))
    if not torch.equal(*updated):
        raise ConfigError(
            f"{section}.invariant_gradients=true: {config.name} updates an element of a parameter with other bits if "
            f"ranks divide the parameter. Set {section}.optimizer.name=torch.optim.AdamW, or use one rank."
        )


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    copies: Iterable[nn.Parameter] = (),
    sum_over_stages: SumOverStages | None = None,
    in_order: bool = False,
) -> float:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`.

    All ranks must call this together.

    Args:
        parameters: the model's parameters; parameters without a gradient are skipped.
        max_norm: largest norm; if None or 0, the norm is only measured.
        copies: parameters that this stage leaves out of the norm, because another pipeline stage also holds them.
        sum_over_stages: function that sums over pipeline stages; None without a pipeline.
        in_order: compute the norm with the same bits for any number of ranks (`ordered_norm`).

    Returns:
        The norm before clipping.
    """
    having = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in having if parameter.grad is not None]
    if not gradients and sum_over_stages is None:
        return 0.0
    elsewhere = {id(parameter) for parameter in copies}
    counted = [gradient for owner, gradient in zip(having, gradients, strict=True) if id(owner) not in elsewhere]
    if in_order:
        from nemo_rl.models.training.ordered_sums import ordered_norm  # slow to import, as in `total_norm`

        norm = ordered_norm(counted)
    else:
        norm = total_norm(counted, sum_over_stages)
    value = norm.item()
    if max_norm and value > max_norm:
        scale = max_norm / (value + 1e-6)
        for gradient in gradients:
            gradient.mul_(scale)
    return value


def total_norm(gradients: Sequence[Tensor], sum_over_stages: SumOverStages | None = None) -> Tensor:
    """Return the joint 2-norm of gradients on any meshes, as a float32 scalar.

    Each rank sums the squares of its own shards, and the sums are reduced over the mesh axes that shard them. Gradients
    may be plain tensors or DTensors, on any mesh, in host or device memory.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and not needed by `check_optimizer`

    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups[layout].append(gradient)
    squares = [_square_sum(group) for group in groups.values()]
    total = sum(squares[1:], squares[0].clone()) if squares else torch.zeros(())
    return (total if sum_over_stages is None else sum_over_stages(total)).sqrt()


def _square_sum(group: list[Tensor]) -> Tensor:
    """Sum the squares over all ranks, for gradients that share mesh and placements."""
    from torch.distributed.tensor import DTensor

    from nemo_rl.models.training.tensor_checks import parts_to_sum

    first = group[0]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in group]
    parts = [part for grad in local for part in parts_to_sum(grad)]
    norms = [torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]
    total = torch.stack(norms).square().sum()
    if isinstance(first, DTensor):
        total = total.to(first.device_mesh.device_type)
        for axis, placement in enumerate(first.placements):
            if not placement.is_replicate():  # is_shard() is False for shards of shards
                dist.all_reduce(total, group=first.device_mesh.get_group(axis))
    return total
