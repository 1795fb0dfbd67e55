"""Keep the states of recurrent layers within each sequence of a packed row.

Mamba, gated delta nets and short convolutions carry a state from token to token. Without its CUDA packages,
transformers ignores the borders of packed sequences in these layers, so a sequence would start with the state of the
sequence before it. `respect_borders` wraps the few functions of a model's file that carry a state. Projections, norms
and gates still compute the whole row.

    body(cu_seq_lens_q) ─► borders ─► causal_conv1d_fn, mamba2_chunk_scan, ... : one padded batch of sequences

These functions are causal, so padding after a sequence does not change its outputs. Invariant: a packed sequence gets
the outputs that it gets in a row of its own, and rows that are not packed are computed as before.
"""

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface.layers import body, decoder_layers
from nemo_rl.utils.errors import ConfigError

_BORDERS = "cu_seq_lens_q"
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
_SHARE, _PADDING = 4, 64
"""A sequence joins a group if it is at most a quarter, or 64 tokens, shorter than the longest sequence of the group.
Most functions compute chunks of 64 tokens."""


@dataclass(frozen=True)
class Core:
    """A function of transformers that carries a state along a row."""

    inputs: tuple[str, ...]
    """Names of the arguments with one entry for each token."""
    axis: int
    """Axis of the tokens in these arguments."""
    axis_of_output: int | None = None
    """Axis of the tokens in the output. If None, that of the arguments."""


_DELTA = Core(("query", "key", "value", "g", "beta"), 1)
CORES = {
    "causal_conv1d_fn": Core(("hidden_states",), -1),
    "mamba_selective_scan": Core(("hidden_states", "dt", "B", "C", "z"), -1),
    "mamba_inner_fn": Core(("xz",), -1, 1),
    "mamba2_chunk_scan": Core(("hidden_states", "dt", "B", "C"), 1),
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
        spans = sorted(pairwise(bounds), key=lambda span: (span[0] - span[1], span[0]))
        if len(spans) == 1:
            return None
        total, tokens, batch = bounds[-1], [], [spans[0]]
        for span in spans[1:]:
            longest = batch[0][1] - batch[0][0]
            if longest - (span[1] - span[0]) > max(longest // _SHARE, _PADDING):
                tokens.append(_index(batch, total))
                batch = []
            batch.append(span)
        tokens.append(_index(batch, total))
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
    """The sequences of the row that a model computes.

    They stay until the next forward pass, because layers may be computed again in the backward pass, which may run in
    another thread.
    """

    def __init__(self) -> None:
        self.groups: SequenceGroups | None = None
        self.in_whole_model = False
        self._read: Callable[[], Tensor | None] = lambda: None
        self._of_read: SequenceGroups | None = None

    def set(self, cu_seq_lens: Tensor | None) -> None:
        """Set the borders `[S + 1]` int32, or None for rows that are not packed. Each tensor is read only once."""
        if cu_seq_lens is not None and self._read() is not cu_seq_lens:
            self._read, self._of_read = weakref.ref(cu_seq_lens), SequenceGroups.of(cu_seq_lens)
        self.groups = None if cu_seq_lens is None else self._of_read


_borders = _Borders()


def respect_borders(hf: PreTrainedModel) -> bool:
    """Make the recurrent layers of a model respect the borders of packed sequences, in place.

    Returns:
        Whether the model has layers that carry a state.
    """
    files = {sys.modules[type(module).__module__] for module in hf.modules() if _is_of_transformers(module)}
    wrapped = [_wrap(file) for file in files]
    if not any(wrapped):
        return False
    if not hasattr(hf, _MARK):
        setattr(hf, _MARK, True)
        hf.register_forward_pre_hook(_enter_whole_model, with_kwargs=True)
        hf.register_forward_hook(_leave_whole_model, always_call=True)
        body(hf).register_forward_pre_hook(_enter_body, with_kwargs=True)
        for layer in decoder_layers(hf):
            layer.register_forward_pre_hook(_enter_layer, with_kwargs=True)
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


def has_states(config: PretrainedConfig) -> bool:
    """Return whether a configuration has a size of layers that carry a state."""
    text = config.get_text_config()
    return any(getattr(text, size, None) is not None for size in _STATE_SIZES)


def _is_of_transformers(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")


def _enter_whole_model(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _borders.set(kwargs.get(_BORDERS))
    _borders.in_whole_model = True


def _leave_whole_model(module: nn.Module, args: Any, output: Any) -> None:
    _borders.in_whole_model = False


def _enter_body(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set the borders, unless the whole model has set them. Some models do not pass them to their body."""
    if not _borders.in_whole_model:
        _borders.set(kwargs.get(_BORDERS))


def _enter_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set the borders again for a layer that is computed again, after other forward passes of a pipeline."""
    if _BORDERS in kwargs:
        _borders.set(kwargs[_BORDERS])


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
        groups = _borders.groups
        if groups is None:
            return core(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
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
        if isinstance(outputs[0], tuple):  # with the last state, which training does not use
            return groups.row([output for output, *_ in outputs], axis), None
        return groups.row(outputs, axis)

    setattr(by_sequence, _MARK, True)
    return by_sequence


def _check(name: str, tokens: dict[str, Tensor], axis: int, total: int) -> None:
    if any(each.shape[axis] != total or each.shape[0] != 1 for each in tokens.values()):
        shapes = {key: list(each.shape) for key, each in tokens.items()}
        raise ConfigError(f"The recurrent function {name} got {shapes} for a packed row of {total} tokens.")
