"""Divide a Hugging Face model over tensor-parallel ranks, in place.

Activations are plain tensors, and parameters become DTensors. While a module runs, its parameters are replaced by this
rank's local parts. A decoder layer consists of *blocks* (attention, MLP) between residual additions:

    residual stream ──enter──► block: every rank computes one term of the block's output ──leave──► residual stream

`enter` gives every rank the same hidden states and sums their gradient; `leave` sums the outputs. With sequence
parallelism the residual stream is divided along the sequence: `enter` gathers it, `leave` reduces and scatters.

Modules that are not in a plan (linear attention, convolutions) are not divided and are outside of blocks. With sequence
parallelism, such a module gets all tokens, because it may mix them, and each rank keeps the outputs of its own tokens.
Gemma's inputs per layer, which a second embedding looks up for all tokens, are reduced to a rank's own tokens too.

Invariant: inside a block, the gradients of undivided parameters (per-head norms, MLA's down-projections, routers, A of
an adapter on a column layer) are partial, and are summed over the ranks. Therefore no architecture needs special
styles. Outside of blocks, all ranks compute the same values, and gradients are whole. With sequence parallelism ranks
compute different tokens, and gradients in the body are partial there too. A scoring head gets whole rows on every rank.

Source: Megatron-LM (arXiv:1909.08053), sequence parallelism (arXiv:2205.05198).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks import collectives
from nemo_rl.distributed.ranks.placements import as_sharded, computing_with
from nemo_rl.models.dtensor.expert_parallel import divide_tokens
from nemo_rl.models.huggingface.layers import body, decoder_layers
from nemo_rl.models.huggingface.mixers import HeadPart, Mixer, find_mixers, is_used_by_weight, set_own_sizes
from nemo_rl.models.huggingface.recurrent import compute_unfused
from nemo_rl.models.huggingface.tensor_plans import Plan, Style, shared_experts, style_of
from nemo_rl.utils.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel ranks, and the communication between blocks and the residual stream."""

    mesh: DeviceMesh
    """Mesh with one axis: the tensor-parallel ranks of this rank's group."""
    sequence_parallel: bool
    """Whether the residual stream is divided along the sequence."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks."""
        return self.mesh.get_group()

    def enter(self, hidden: Tensor) -> Tensor:
        """Return a block's input `[b, T, D]` from the residual stream `[b, T, D]` or `[b, T / tp, D]`."""
        if self.sequence_parallel:
            return collectives.all_gather(hidden, 1, self.group, partial_gradient=True)
        return collectives.reduce_gradient(hidden, self.group)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens `[b, T / tp, D]` of a tensor `[b, T, D]` that all ranks computed."""
        return collectives.part_of(hidden, 1, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """Sum all ranks' outputs of a block into the residual stream."""
        if self.sequence_parallel:
            return collectives.reduce_scatter(hidden, 1, self.group)
        return collectives.all_reduce(hidden, self.group)


@dataclass(frozen=True)
class _Local:
    """Replacement of a parameter by a local tensor while its module runs."""

    gradient: Placement
    """Placement of the local tensor's gradient."""
    zero: bool = False
    """Whether this rank uses zeros, because another rank adds the whole parameter."""
    rows: Tensor | None = None
    """`[R]` rows of a fused layer that this rank uses, after the parameter is gathered; None uses the local part."""
    dim: int = 0
    """Dimension along which the parameter is divided."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return the local tensor that the module uses."""
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local(grad_placements=[self.gradient])
        if self.rows is not None:
            group = parameter.device_mesh.get_group()
            whole = collectives.all_gather(local, self.dim, group, partial_gradient=True)
            return whole.index_select(self.dim, self.rows)
        return local * 0 if self.zero else local


def divide_layers(
    hf: PreTrainedModel,
    plan: Plan,
    tensor: TensorParallel,
    *,
    experts: Collection[str] = (),
    dispatched: bool = False,
) -> None:
    """Divide a model by its plan. Its parameters may be on the meta device.

    Args:
        hf: the model, unsharded except for its experts.
        experts: names of the modules of experts, which this function does not divide.
        dispatched: whether experts get tokens from other ranks. If so, the ranks divide the tokens of a block with
            experts, and its other modules are not divided.

    Raises:
        ConfigError: a size is not a multiple of the number of ranks, or a divided module is in no block.
    """
    found = _Division.of(hf, plan, experts, dispatched=dispatched)
    styles, blocks, token_blocks = found.styles, found.blocks, found.token_blocks
    if found.recurrent:
        compute_unfused(hf)
    outputs = [name for name, style in styles.items() if style.how == "output"]
    mixers = _mixers(hf, [*blocks, *token_blocks]) if tensor.sequence_parallel else []
    divided = _Divided(hf)
    body_name = next(name for name, module in hf.named_modules() if module is body(hf))
    for name, module in hf.named_modules():
        if _within(name, experts):
            continue
        # # With sequence parallelism, all modules of the body outside of blocks get parts of rows. The head does not.
        of_block = _within(name, [*blocks, *token_blocks]) and name not in outputs
        of_part = of_block or (tensor.sequence_parallel and _within(name, [body_name]))
        views = _divide_module(name, module, styles, tensor, divided, partial_gradient=of_part)
        if views and is_used_by_weight(name, module):
            owner: Any = hf.get_submodule(name.rpartition(".")[0])
            owner.forward = partial(_run_locally, owner.forward, module, views)
    _wrap_blocks(hf, found, outputs, tensor)
    for name in mixers:  # every rank computes all tokens and keeps its own
        mixer: Any = hf.get_submodule(name)
        mixer.forward = partial(_run_between, mixer.forward, tensor.enter, tensor.own_tokens)
    for name in token_blocks if not tensor.sequence_parallel else []:
        divide_tokens(hf.get_submodule(name), tensor.group)
    embedding = hf.get_input_embeddings()
    if embedding is not None and isinstance(embedding, nn.Embedding):
        _divide_lookup(embedding, tensor)
    text: Any = body(hf)
    if tensor.sequence_parallel and hasattr(text, _INPUTS_PER_LAYER):
        setattr(text, _INPUTS_PER_LAYER, partial(_project_own_tokens, getattr(text, _INPUTS_PER_LAYER), tensor))


def _wrap_blocks(hf: PreTrainedModel, found: "_Division", outputs: Collection[str], tensor: TensorParallel) -> None:
    """Make each block get its input from the residual stream, and add its output to it."""
    for name in found.blocks:
        block: Any = hf.get_submodule(name)
        fused = any(style.fused for below, style in found.styles.items() if _within(below, [name]))
        if name in found.recurrent:
            _keep_own_heads(block, found.recurrent[name], tensor.mesh)
        elif fused and hasattr(block, "config"):
            _count_own_heads(block, tensor.mesh.size())
        for each in [each for each in found.styles if each.startswith(f"{name}.{_CHOOSER}.")]:
            _count_own_heads(hf.get_submodule(each.rpartition(".")[0]), tensor.mesh.size())
        of_output = [each for each in outputs if _within(each, [name])]
        leave = _unchanged if of_output else tensor.leave
        block.forward = partial(_run_between, block.forward, tensor.enter, leave)
        for each in of_output:
            norm: Any = hf.get_submodule(each)
            norm.forward = partial(_run_between, norm.forward, tensor.leave, _unchanged)


@dataclass(frozen=True)
class _Division:
    """The parts of a model that a plan divides, by name."""

    styles: dict[str, Style]
    """Modules and parameters that ranks divide."""
    recurrent: dict[str, Mixer]
    """Recurrent layers that ranks divide."""
    blocks: list[str]
    """Blocks whose outputs ranks sum."""
    token_blocks: list[str]
    """Blocks with dispatched experts, whose tokens ranks divide."""

    @classmethod
    def of(cls, hf: PreTrainedModel, plan: Plan, experts: Collection[str], *, dispatched: bool) -> "_Division":
        """Find the parts. The arguments are those of `divide_layers`."""
        token_blocks = _blocks(hf, experts) if dispatched else []
        styles = {name: style for name, style in _planned(hf, plan).items() if not _within(name, token_blocks)}
        recurrent = {name: mixer for name, mixer in find_mixers(hf).items() if f"{name}.{mixer.out}" in styles}
        blocks = _blocks(hf, [*styles, *(() if dispatched else experts)], recurrent)
        _refuse_strays(hf, styles, blocks)
        return cls(styles | shared_experts(hf, blocks, [*styles, *experts]), recurrent, blocks, token_blocks)


def require_divisible(
    hf: PreTrainedModel, plan: Plan, ranks: int, *, experts: Collection[str] = (), dispatched: bool = False
) -> None:
    """Check that ranks can divide every weight of a plan equally. Only shapes are read.

    Args:
        hf: the whole model, with or without weights.
        plan: as in `divide_layers`, with `experts` and `dispatched`.
        ranks: number of tensor-parallel ranks.

    Raises:
        ConfigError: a size is not a multiple of the number of ranks, or a divided module is in no block.
    """
    styles = _Division.of(hf, plan, experts, dispatched=dispatched).styles
    for name, module in hf.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            own = styles.get(f"{name}.{parameter_name}", styles.get(name))
            if not _within(name, experts):
                place = _placement(own, parameter_name)
                _require_divisible(f"{name}.{parameter_name}", parameter, place, own, ranks)


class _Divided:
    """Divide parameters. A parameter with several names (tied weights) is divided only once."""

    def __init__(self, hf: nn.Module) -> None:
        uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
        self._tied = {number for number, count in uses.items() if count > 1}
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def of(self, parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
        """Return the sharded parameter that replaces the given whole parameter."""
        if id(parameter) in self._made:
            return self._made[id(parameter)][1]
        made = as_sharded(parameter, placement, mesh)
        if id(parameter) in self._tied:  # keeping the whole parameter reserves its id
            self._made[id(parameter)] = (parameter, made)
        return made


def _run_locally(
    forward: Callable[..., Any], module: nn.Module, views: dict[str, _Local], *args: Any, **kw: Any
) -> Any:
    parts = {name: view.of(module._parameters[name]) for name, view in views.items()}  # type: ignore[arg-type]
    with computing_with(module, parts):
        return forward(*args, **kw)


def _run_and_sum(forward: Callable[..., Tensor], group: dist.ProcessGroup, *args: Any, **kw: Any) -> Tensor:
    """Sum a layer's outputs over the ranks inside a block, where each rank's gradient of the sum is partial."""
    return collectives.reduce_gradient(collectives.all_reduce(forward(*args, **kw), group), group)


@torch.compiler.disable
def _run_with_means(
    forward: Callable[..., Tensor], tensor: "TensorParallel", groups: int, *args: Any, **kw: Any
) -> Tensor:
    """Run a norm over channels that the ranks divide, with means over all channels of a group.

    Raises:
        ConfigError: the norm computes no mean over its last dimension.
    """
    with _Means(tensor, groups) as means:
        out = forward(*args, **kw)
    if not means.found:
        raise ConfigError(
            "a norm over heads does not compute a mean of squares, so tensor-parallel ranks cannot divide it. Set "
            "policy.dtensor_cfg.tensor_parallel_size=1."
        )
    return out


class _Means(TorchFunctionMode):
    """Mode in which a mean over the last dimension of a tensor is one over the channels of several ranks.

    Each rank has equally many channels, and all of them are in one group, so the mean is that of the ranks' means.
    """

    def __init__(self, tensor: "TensorParallel", groups: int) -> None:
        super().__init__()
        self._tensor, self._groups = tensor, groups
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _MEAN or result.dim() < 2 or result.shape[-1] != 1:
            return result
        self.found = True
        every = collectives.all_gather(result, -1, self._tensor.group, partial_gradient=True)
        own = self._tensor.mesh.get_local_rank() * self._groups // self._tensor.mesh.size()
        return torch.sum(every.chunk(self._groups, -1)[own], -1, keepdim=True) * (self._groups / every.shape[-1])


_MEAN = (torch.mean, Tensor.mean)


def _run_between(
    forward: Callable[..., Any],
    enter: Callable[[Tensor], Tensor],
    leave: Callable[[Tensor], Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a forward with `enter` applied to its input hidden states, and `leave` to its output hidden states.

    The input is the first argument or `hidden_states`, and the output is the returned value or its first item. `enter`
    is also applied to further hidden states, which are tensors of the same shape (Zamba's original hidden states).
    """
    stream = args[0] if args else kwargs["hidden_states"]

    def entered(value: Any) -> Any:
        return enter(value) if isinstance(value, Tensor) and value.shape == stream.shape else value

    args, kwargs = tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}
    output = forward(*args, **kwargs)
    if isinstance(output, tuple):
        return (leave(output[0]), *output[1:])
    return leave(output)


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _blocks(hf: PreTrainedModel, divided: Iterable[str], recurrent: Collection[str] = ()) -> list[str]:
    """Return the names of the direct children of decoder layers that contain one of these modules or parameters.

    If a child is a list, as the two attention blocks of a LongCat layer are, each of its items is a block.

    Args:
        divided: names of modules and parameters.
        recurrent: names of recurrent layers. These are blocks also where they are not direct children.
    """
    names = {id(module): name for name, module in hf.named_modules()}
    layers = [names[id(layer)] for layer in decoder_layers(hf)]
    found: dict[str, None] = {}
    for name in divided:
        layer = next((layer for layer in layers if _within(name, [layer])), None)
        own = next((each for each in recurrent if _within(name, [each])), None)
        if own is not None:
            found[own] = None
        elif layer is not None:
            found[_part_of_layer(hf, layer, name)] = None
    return list(found)


def _part_of_layer(hf: PreTrainedModel, layer: str, name: str) -> str:
    """Return the name of the direct child of a layer that contains a module, or of the child's item if it is a list."""
    parts = name.removeprefix(f"{layer}.").split(".")
    child = hf.get_submodule(f"{layer}.{parts[0]}")
    return ".".join([layer, *parts[: 2 if isinstance(child, nn.ModuleList) else 1]])


def _mixers(hf: PreTrainedModel, blocks: list[str]) -> list[str]:
    """Return the names of the direct children of decoder layers, outside of blocks, that may mix tokens.

    These are all children with a matrix. Children with vectors only (norms) process tokens separately. If a child
    contains a block, as the Mamba layer inside a layer of Zamba does, its own children are meant instead.
    """
    names = {id(module): name for name, module in hf.named_modules()}
    pending, found = [child for layer in decoder_layers(hf) for child in layer.children()], []
    while pending:
        child = pending.pop(0)
        name = names[id(child)]
        if name in blocks or not any(parameter.dim() > 1 for parameter in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList) or any(_within(block, [name]) for block in blocks):
            pending.extend(child.children())
        else:
            found.append(name)
    return found


_CHOOSER = "indexer"
"""Module of an attention layer that chooses keys for each head of keys."""
_INPUTS_PER_LAYER = "project_per_layer_inputs"
"""Method of Gemma's text models that adds a second embedding `[b, T, layers, d]` to a projection of the first one."""


def _project_own_tokens(
    project: Callable[..., Tensor], tensor: TensorParallel, embedded: Tensor, per_layer: Tensor | None = None
) -> Tensor:
    return project(embedded, None if per_layer is None else tensor.own_tokens(per_layer))


def _within(name: str, owners: Iterable[str]) -> bool:
    """Return whether a module or parameter is one of the owners or is inside one of them."""
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _count_own_heads(block: Any, ranks: int) -> None:
    """Set a block's numbers of heads to those of this rank. The block splits a fused layer's output by them."""
    block.config = copy(block.config)
    for owner in (block, block.config):
        for field in ("num_attention_heads", "num_heads", "num_key_value_heads"):
            if isinstance(getattr(owner, field, None), int):
                setattr(owner, field, getattr(owner, field) // ranks)


def _keep_own_heads(block: Any, mixer: Mixer, mesh: DeviceMesh) -> None:
    """Set a recurrent layer's numbers of heads and channels, and its factors of channels, to those of this rank."""
    set_own_sizes(block, mixer, mesh.size())
    factors = getattr(block, "mup_vector", None)
    if factors is not None:
        block.mup_vector = factors.index_select(-1, _own_rows(mixer.columns["in_proj"], mesh).to(factors.device))


def _planned(hf: PreTrainedModel, plan: Plan) -> dict[str, Style]:
    """Return the names and styles of the modules and parameters that a plan divides."""
    names = [*(name for name, _ in hf.named_modules()), *(name for name, _ in hf.named_parameters())]
    return {name: style for name in names if (style := style_of(name, plan)) is not None}


def _refuse_strays(hf: PreTrainedModel, styles: Mapping[str, Style], blocks: list[str]) -> None:
    for name, style in styles.items():
        if (style.how != "vocabulary") != _within(name, blocks):
            raise ConfigError(
                f"the tensor-parallel plan of {type(hf).__name__} divides {name!r} as {style.how!r}: columns and rows "
                "are divided inside the attention or MLP of a decoder layer, a vocabulary outside of layers."
            )


def _divide_module(
    name: str,
    module: nn.Module,
    styles: Mapping[str, Style],
    tensor: TensorParallel,
    divided: _Divided,
    *,
    partial_gradient: bool,
) -> dict[str, _Local]:
    """Replace a module's own parameters with DTensors. Make the module use their local parts, and return these."""
    views: dict[str, _Local] = {}
    style = styles.get(name)
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        own = styles.get(f"{name}.{parameter_name}", style)
        placement = _placement(own, parameter_name)
        _require_divisible(f"{name}.{parameter_name}", parameter, placement, own, tensor.mesh.size())
        module._parameters[parameter_name] = divided.of(parameter, placement, tensor.mesh)
        views[parameter_name] = _view(own, parameter_name, placement, tensor.mesh, partial_gradient)
    if not views:
        return views
    if style is not None and style.how == "norm" and style.groups % tensor.mesh.size():
        module.forward = partial(_run_with_means, module.forward, tensor, style.groups)
    if style is not None and style.how == "sum":
        module.forward = partial(_run_and_sum, module.forward, tensor.group)
    module.forward = partial(_run_locally, module.forward, module, views)
    return views


def _placement(style: Style | None, parameter_name: str) -> Placement:
    """Return how a parameter is divided. An adapter's B is divided like the weight's rows, and A like its columns."""
    if style is None or style.how == "output":
        return Replicate()
    if style.dim is not None:
        return Shard(style.dim)
    if style.how in ("row", "sum"):
        return Shard(1) if parameter_name in ("weight", "lora_A") else Replicate()
    return Replicate() if parameter_name == "lora_A" else Shard(0)


def _view(
    style: Style | None, parameter_name: str, placement: Placement, mesh: DeviceMesh, partial_gradient: bool
) -> _Local:
    if isinstance(placement, Shard):
        rows = _own_rows(style.fused, mesh) if style is not None and style.fused else None
        return _Local(placement, rows=rows, dim=placement.dim)
    adds_once = style is not None and style.how in ("row", "sum") and parameter_name == "bias"
    gradient = Partial() if partial_gradient else Replicate()
    return _Local(gradient, zero=adds_once and mesh.get_local_rank() > 0)


def _own_rows(parts: tuple[HeadPart, ...], mesh: DeviceMesh) -> Tensor:
    """Return the indices of a fused layer's rows for this rank's heads or features, part by part.

    The indices are on the mesh's device, so that a forward pass need not copy them.
    """
    size, rank, first, rows = mesh.size(), mesh.get_local_rank(), 0, list[Tensor]()
    for part in parts:
        own = part.own(size)
        begin = first + (rank * part.heads // size) * (part.size // part.heads)
        rows.append(torch.arange(begin, begin + own))
        first += part.size
    return torch.cat(rows).to(mesh.device_type)


def _require_divisible(name: str, parameter: Tensor, placement: Placement, style: Style | None, ranks: int) -> None:
    sizes = [] if style is None else [part.heads for part in (*style.heads, *style.fused) if not part.divides(ranks)]
    if isinstance(placement, Shard):
        sizes.append(parameter.shape[placement.dim])
    for size in sizes:
        if size % ranks:
            raise ConfigError(
                f"{name} has {size} heads, outputs or inputs to divide, which is not a multiple of "
                f"policy.dtensor_cfg.tensor_parallel_size={ranks}. The largest smaller size that divides them: "
                f"{next(smaller for smaller in range(ranks - 1, 0, -1) if size % smaller == 0)}."
            )


def _divide_lookup(embedding: nn.Embedding, tensor: TensorParallel) -> None:
    """Make each rank look up tokens in its own rows of the embedding, and sum the results over ranks."""
    rows = embedding.weight.shape[0] // tensor.mesh.size()
    first = rows * tensor.mesh.get_local_rank()
    padding = embedding.padding_idx
    # # `padding_idx`, the row without a gradient, must be counted from this rank's first row.
    embedding.padding_idx = padding - first if padding is not None and 0 <= padding - first < rows else None
    lookup: Any = embedding
    lookup.forward = partial(_look_up, embedding.forward, tensor, first, rows)


def _look_up(forward: Callable[..., Tensor], tensor: TensorParallel, first: int, rows: int, ids: Tensor) -> Tensor:
    here = (ids >= first) & (ids < first + rows)
    found = forward(torch.where(here, ids - first, 0))
    return tensor.leave(torch.where(here[..., None], found, 0))
