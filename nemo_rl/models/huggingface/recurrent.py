"""Keep the states of recurrent layers within each sequence of a packed row, and compute rows that ranks divide.

Mamba, gated delta nets and short convolutions carry a state from token to token. Without its CUDA packages,
transformers ignores the borders of packed sequences in these layers, so a sequence would start with the state of the
sequence before it. `respect_borders` wraps the few functions of a model's file that carry a state. Projections, norms
and gates still compute the whole row.

    body(cu_seq_lens_q) ─► borders ─► causal_conv1d_fn, mamba2_chunk_scan, ... : one padded batch of sequences

These functions are causal, so padding after a sequence does not change its outputs. Invariant: a packed sequence gets
the outputs that it gets in a row of its own, and rows that are not packed are computed as before. A row whose sequences
share tokens is computed by `shared_states`.

The functions also treat each head (or channel) separately. If ranks divide the tokens of a row (context parallelism),
they exchange tokens for heads around each function, so that a rank computes all tokens of the row for some heads:

    own tokens, all heads ─► all-to-all ─► all tokens, own heads: function ─► all-to-all ─► own tokens, all heads

Invariant: the gradient of a parameter with one entry for each head is partial on each rank, like all other gradients
under context parallelism. Source: Ulysses (arXiv:2309.14509), applied to the scan as in Megatron-LM.
"""

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface import shared_states
from nemo_rl.models.huggingface.layers import body, decoder_layers
from nemo_rl.utils.errors import ConfigError

_BORDERS, _ROW = "cu_seq_lens_q", "divided_row"
_STATE_SIZES = (
    "ssm_state_size",
    "mamba_d_state",
    "state_size",
    "linear_key_head_dim",
    "linear_attn_config",
    "conv_L_cache",
    "lru_width",
)
"""Fields of configurations of models with recurrent layers."""
_MARK = "nemo_rl_respects_borders"


@dataclass(frozen=True)
class Core:
    """A function of transformers that carries a state along a row."""

    inputs: tuple[str, ...]
    """Names of the arguments with one entry for each token."""
    axis: int
    """Axis of the tokens in these arguments."""
    heads: int | None = None
    """Axis of the heads or channels in these arguments. None for a fused function, which also mixes channels; then
    rows that ranks divide are computed by the functions of its parts."""
    of_all_heads: tuple[str, ...] = ()
    """Names of the arguments among `inputs` that have no axis of heads."""
    per_head: tuple[str, ...] = ()
    """Names of the arguments without tokens that have one entry for each head or channel."""
    axis_of_output: int | None = None
    """Axis of the tokens in the output. If None, that of the arguments."""
    states: shared_states.StateNames | None = None
    """Arguments for states at the start and the end. None if the function has none."""


class RowExchange(Protocol):
    """A row whose tokens are on several ranks, each of which computes some of the heads."""

    cu_seq_lens: Tensor
    """Borders of the sequences in the whole row, `[S + 1]` int32."""
    ranks: int
    """Number of ranks."""

    def to_heads(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        """Exchange own tokens with all heads for all tokens, in order, with own heads. Axes are given."""

    def to_tokens(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        """Undo `to_heads`."""

    def gathered(self, x: Tensor, tokens: int) -> Tensor:
        """Gather the tokens of all ranks along an axis, in order."""

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Return the entries `[H / ranks, ...]` of this rank's heads."""


_DELTA = Core(
    ("query", "key", "value", "g", "beta"),
    1,
    2,
    states=shared_states.StateNames("initial_state", "output_final_state", is_pair=True),
)
_CONVOLUTION = "causal_conv1d_fn"
CORES = {
    _CONVOLUTION: Core(("hidden_states",), -1, 1, per_head=("weight", "bias")),
    "mamba_selective_scan": Core(
        ("hidden_states", "dt", "B", "C", "z"), -1, 1, of_all_heads=("B", "C"), per_head=("A", "D", "delta_bias")
    ),
    "mamba_inner_fn": Core(("xz",), -1, axis_of_output=1),
    "mamba2_chunk_scan": Core(
        ("hidden_states", "dt", "B", "C"),
        1,
        2,
        per_head=("A", "D", "dt_bias"),
        states=shared_states.StateNames("initial_states", "return_final_states", is_pair=False),
    ),
    "mamba2_split_conv1d_scan_combined": Core(("zxbcdt",), 1),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
}
"""Functions by their names in the files of transformers."""


@dataclass(frozen=True)
class SequenceGroups:
    """The sequences of a packed row, in groups of similar lengths that are computed as one padded batch."""

    tokens: list[Tensor]
    """Index in the row of each token of a group, `[S, L]` int64. On padding, it is the number of tokens of the row."""
    order: Tensor
    """Index of each token of the row in the concatenated groups, `[T]` int64."""

    @classmethod
    def of(cls, cu_seq_lens: Tensor) -> "SequenceGroups | None":
        """Group the sequences between the borders `[S + 1]` int32. None if there is only one sequence."""
        bounds = cu_seq_lens.tolist()
        spans, total = list(pairwise(bounds)), bounds[-1]
        if len(spans) == 1:
            return None
        groups = shared_states.of_similar_lengths([stop - start for start, stop in spans])
        tokens = [_index([spans[number] for number in group], total) for group in groups]
        flat = torch.cat([index.flatten() for index in tokens])
        order = torch.empty(total + 1, dtype=torch.int64).scatter_(0, flat, torch.arange(len(flat)))[:total]
        device = cu_seq_lens.device
        return cls([index.to(device) for index in tokens], order.to(device))

    def batches(self, row: Tensor, axis: int) -> Iterator[Tensor]:
        """Yield the groups of a row `[1, ...]` with T tokens on `axis`, as batches `[S, ...]` with L tokens on it."""
        flat = row.movedim(axis, 1)[0]
        padded = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
        return (padded[index].movedim(1, axis) for index in self.tokens)

    def row(self, batches: Sequence[Tensor], axis: int) -> Tensor:
        """Return the row `[1, ...]` of the outputs for the groups."""
        flat = torch.cat([batch.movedim(axis, 1).flatten(0, 1) for batch in batches])
        return flat[self.order][None].movedim(1, axis)


def _index(spans: Sequence[tuple[int, int]], padding: int) -> Tensor:
    return pad_sequence([torch.arange(*span) for span in spans], batch_first=True, padding_value=padding)


class _Borders:
    """The sequences of the row that a model computes, and the ranks that divide it.

    They stay until the next forward pass, because layers may be computed again in the backward pass, which may run in
    another thread. They apply only within the layers of models that respect borders: the wrapped functions also serve
    other models of the same process.
    """

    def __init__(self) -> None:
        self.groups: SequenceGroups | None = None
        self.exchange: RowExchange | None = None
        self.tree: shared_states.PrefixTree | None = None
        self.in_whole_model = False
        self.in_layer = False
        self._read: Callable[[], Tensor | None] = lambda: None
        self._of_read: SequenceGroups | None = None
        self._trees = weakref.WeakKeyDictionary[Any, shared_states.PrefixTree]()

    def enter(self, model_inputs: Mapping[str, Any]) -> None:
        """Set the row to that of the arguments of a forward pass. The borders of each row are read only once."""
        row = model_inputs.get(_ROW)
        self.exchange, self.tree = getattr(row, "exchange", None), self._tree_of(row)
        bounds = model_inputs.get(_BORDERS) if self.exchange is None else self.exchange.cu_seq_lens
        if bounds is not None and self._read() is not bounds:
            self._read, self._of_read = weakref.ref(bounds), SequenceGroups.of(bounds)
        self.groups = None if bounds is None else self._of_read

    def _tree_of(self, row: Any) -> shared_states.PrefixTree | None:
        """Return the parts of a row whose sequences share tokens, or None for other rows."""
        if not hasattr(row, "parents"):
            return None
        if row not in self._trees:
            self._trees[row] = shared_states.PrefixTree(row.lengths, row.parents)
        return self._trees[row]


_borders = _Borders()


def respect_borders(hf: PreTrainedModel) -> bool:
    """Make the recurrent layers of a model respect the borders of packed sequences, in place.

    Returns:
        Whether the model has layers that carry a state.
    """
    wrapped = [_wrap(file) for file in _files(hf)]
    if not any(wrapped):
        return False
    if not hasattr(hf, _MARK):
        setattr(hf, _MARK, True)
        hf.register_forward_pre_hook(_enter_whole_model, with_kwargs=True)
        hf.register_forward_hook(_leave_whole_model, always_call=True)
        body(hf).register_forward_pre_hook(_enter_body, with_kwargs=True)
        for layer in decoder_layers(hf):
            layer.register_forward_pre_hook(_enter_layer, with_kwargs=True)
            layer.register_forward_hook(_leave_layer, always_call=True)
    return True


def use_configured_time_steps(hf: PreTrainedModel) -> None:
    """Limit the time steps of Mamba-2 layers to the range of the configuration, as engines do, in place.

    transformers' layers of Nemotron-H and Zamba2 raise time steps to at least `time_step_min`, which only describes
    initial values. The published code of these models, Megatron Core and vLLM do not
    (https://github.com/huggingface/transformers/pull/48989).
    """
    limits = time_step_limits(hf.config)
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "time_step_limit")]
    for layer in layers:
        layer.time_step_limit = limits


def time_step_limits(config: PretrainedConfig) -> tuple[float, float]:
    """Return the smallest and the largest time step of a configuration's Mamba-2 layers."""
    smallest, largest = getattr(config.get_text_config(), "time_step_limit", None) or (0.0, math.inf)
    return float(smallest), float(largest)


def compute_unfused(hf: PreTrainedModel) -> None:
    """Make recurrent layers call their projections, norms and cores one by one, in place.

    With CUDA packages, one function computes a whole layer from the weights of its modules. It would ignore adapters,
    and norms over channels that ranks divide.
    """
    for file in _files(hf):
        for name, spec in CORES.items():
            if spec.heads is None and hasattr(file, name):
                setattr(file, name, _without_fused)


def _without_fused(*args: Any, **kwargs: Any) -> None:
    """Return None, after which a layer calls its parts (transformers does this without the CUDA packages)."""


def _files(hf: PreTrainedModel) -> set[ModuleType]:
    return {sys.modules[type(module).__module__] for module in hf.modules() if _is_of_transformers(module)}


def has_states(config: PretrainedConfig) -> bool:
    """Return whether a configuration has a size of layers that carry a state."""
    text = config.get_text_config()
    return any(getattr(text, size, None) is not None for size in _STATE_SIZES)


def _is_of_transformers(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")


def enter_row(hf: PreTrainedModel, model_inputs: Mapping[str, Any]) -> None:
    """Set the row that layers of a model compute, or compute again in a backward pass between other forward passes."""
    if hasattr(hf, _MARK):
        _borders.enter(model_inputs)


def _enter_whole_model(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _borders.enter(kwargs)
    _borders.in_whole_model = True


def _leave_whole_model(module: nn.Module, args: Any, output: Any) -> None:
    _borders.in_whole_model = False


def _enter_body(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set the row, unless the whole model has set it. Some models do not pass all arguments to their body."""
    if not _borders.in_whole_model:
        _borders.enter(kwargs)


def _enter_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set the row again for a layer that is computed again, after other forward passes of a pipeline."""
    _borders.in_layer = True
    if _BORDERS in kwargs or _ROW in kwargs:
        _borders.enter(kwargs)


def _leave_layer(module: nn.Module, args: Any, output: Any) -> None:
    _borders.in_layer = False


def _wrap(file: ModuleType) -> bool:
    """Wrap the functions of a file that carry a state. Return whether there are any."""
    names = [name for name in CORES if callable(getattr(file, name, None))]
    for name in names:
        core = getattr(file, name)
        if not hasattr(core, _MARK):
            setattr(file, name, _by_sequence(core, CORES[name]))
    return bool(names)


def _by_sequence(core: Callable[..., Any], spec: Core) -> Callable[..., Any]:
    """Return a function that calls `core` for the sequences of a packed row, and puts the outputs in one row."""
    signature = inspect.signature(core)

    @functools.wraps(core)
    @torch.compiler.disable
    def by_sequence(*args: Any, **kwargs: Any) -> Any:
        groups, exchange = _borders.groups, _borders.exchange
        if not _borders.in_layer:
            return core(*args, **kwargs)
        if _borders.tree is not None:
            return _in_tree(core, spec, _borders.tree, signature.bind(*args, **kwargs))
        if groups is None and exchange is None:
            return core(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        heads = spec.heads
        if exchange is not None:
            if heads is None:
                return None
            _take_own_heads(exchange, spec, heads, bound.arguments)
        output = core(*bound.args, **bound.kwargs) if groups is None else _in_groups(core, spec, groups, bound)
        hidden, *state = output if isinstance(output, tuple) else (output,)
        if exchange is not None and heads is not None:
            hidden = exchange.to_tokens(hidden, spec.axis, heads)
        return (hidden, None) if state else hidden  # training does not use the last state

    setattr(by_sequence, _MARK, core)
    return by_sequence


def _in_tree(
    core: Callable[..., Any], spec: Core, tree: shared_states.PrefixTree, bound: inspect.BoundArguments
) -> Any:
    """Call a function for the parts of a row whose sequences share tokens."""
    if spec.heads is None:
        return None
    given = bound.arguments
    tokens = {name: given[name] for name in spec.inputs if isinstance(given.get(name), Tensor)}
    _check(core.__name__, tokens, spec.axis, tree.num_tokens)
    if spec is CORES[_CONVOLUTION]:
        return shared_states.convolve(core, bound, spec.inputs[0], spec.axis, bound.arguments["weight"].shape[-1], tree)
    if spec.states is None:
        shared_states.refuse_shared(core.__name__)
    return shared_states.scan(core, bound, spec.inputs, spec.axis, spec.states, tree)


def without_borders(core: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers as it was before `respect_borders`."""
    own: Callable[..., Any] = getattr(core, _MARK, core)
    return own


def _in_groups(core: Callable[..., Any], spec: Core, groups: SequenceGroups, bound: inspect.BoundArguments) -> Any:
    """Call a function for each group of sequences, and return its output for the row."""
    given = bound.arguments
    tokens = {name: given[name] for name in spec.inputs if isinstance(given.get(name), Tensor)}
    _check(core.__name__, tokens, spec.axis, len(groups.order))
    outputs = []
    for batch in zip(*(groups.batches(each, spec.axis) for each in tokens.values()), strict=True):
        given.update(zip(tokens, batch, strict=True))
        output = core(*bound.args, **bound.kwargs)
        if output is None:  # a fused function without its CUDA package
            return None
        outputs.append(output)
    axis = spec.axis if spec.axis_of_output is None else spec.axis_of_output
    if isinstance(outputs[0], tuple):
        return groups.row([output for output, *_ in outputs], axis), None
    return groups.row(outputs, axis)


def _take_own_heads(exchange: RowExchange, spec: Core, heads: int, given: dict[str, Any]) -> None:
    """Replace the arguments of a function by those of the whole row for this rank's heads, in place.

    Groups of heads that share an input (B and C of Mamba-2) are repeated if ranks do not divide their number.
    """
    for name in spec.inputs:
        each = given.get(name)
        if not isinstance(each, Tensor):
            continue
        if name in spec.of_all_heads:
            given[name] = exchange.gathered(each, spec.axis)
            continue
        groups = each.shape[heads]
        copies = math.lcm(groups, exchange.ranks) // groups
        if copies > 1:
            each = each.repeat_interleave(copies, heads)
        given[name] = exchange.to_heads(each, spec.axis, heads)
    for name in spec.per_head:
        if isinstance(given.get(name), Tensor):
            given[name] = exchange.own_heads(given[name])


def _check(name: str, tokens: dict[str, Tensor], axis: int, total: int) -> None:
    if any(each.shape[axis] != total or each.shape[0] != 1 for each in tokens.values()):
        shapes = {key: list(each.shape) for key, each in tokens.items()}
        raise ConfigError(f"The recurrent function {name} got {shapes} for a packed row of {total} tokens.")
