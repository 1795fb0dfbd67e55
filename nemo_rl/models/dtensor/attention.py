"""Choose the attention of a model for training, and check the registered function on the model.

`choose_attention` uses the registered function (`attention.registered`) only if a check on the model passes. The check
scores two sequences twice: padded, by the model's own attention, and in the layout of training (packed, padded or
divided), by the registered function. The outputs differ if a mask contains more than causality and windows, or if
tokens interact outside attention, as in state-space or convolution layers. They also differ if the model builds masks
or positions itself. Sliding windows are shortened during the check, so that its two short sequences are longer than the
windows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.models.attention.plan import AttentionPlan, Piece
from nemo_rl.models.attention.registered import VARLEN_ATTENTION, register_varlen_attention
from nemo_rl.models.huggingface.load import WITHOUT_PACKING, attention_of_parts
from nemo_rl.models.huggingface.recurrent import respect_borders
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.models.training.shared_prefixes import share_prefixes
from nemo_rl.utils.errors import ConfigError


def set_attention(model: PreTrainedModel, text_attention: str) -> None:
    """Set the attention of a model, in place. Modules that read images keep an attention that is not causal."""
    model.set_attn_implementation(attention_of_parts(model.config, text_attention))


logger = logging.getLogger(__name__)

Forward = Callable[[PreTrainedModel, dict[str, Any]], Tensor]
"""Function from a model and its inputs to the `[b, T, ...]` outputs that are compared."""


class _Sequences(NamedTuple):
    """Sequences with which an architecture is tested."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    alike: tuple[int, ...] = ()
    """Number of tokens at the start of each sequence that equal those of the one before it."""


_LENGTHS = (11, 9)
_PACKED_LENGTHS = (11, 9, 1, 70)
"""Lengths of packed sequences: two that end within a chunk of a recurrent layer, one token, and more than a chunk."""
_ALIKE = (0, 5)
_TWO = _Sequences(_LENGTHS, _ALIKE)
_SHARED = _Sequences((80, 76, 72, 9), (0, 70, 66, 0))
"""Sequences that share more than a chunk of a recurrent layer, and then fewer tokens than its convolution reads."""
_STRIDE = 7
_WINDOW = 4
_WITHOUT_DIVISION = "Set policy.dtensor_cfg.context_parallel_size=1 for this model."


def logits(model: PreTrainedModel, model_inputs: dict[str, Any]) -> Tensor:
    """Return the `[b, T, V]` logits of a language model."""
    return model(**model_inputs, use_cache=False).logits


def use_registered_attention(
    model: PreTrainedModel, *, packed: bool, divided: bool, forward: Forward = logits
) -> PreTrainedModel:
    """Set the registered attention on a model if outputs stay equal. Otherwise, keep the model's own attention.

    Args:
        model: the unsharded model with its real weights.
        packed: sequences are packed into rows.
        divided: context-parallel ranks divide rows.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: packing or division needs the registered attention, and the outputs differ with it.
    """
    own = model.config._attn_implementation
    try:
        if not model._can_set_attn_implementation():
            raise ConfigError(f"{type(model).__name__} computes its attention in its own code.")
        set_attention(model, register_varlen_attention())
        if packed or divided:
            respect_borders(model)
        if packed:
            verify_packing(model, forward)
        if divided:
            verify_division(model, forward)
        if not (packed or divided):
            _verify(model, forward, "padded", _plain)
    except ConfigError as error:
        if packed or divided:
            raise
        if own == VARLEN_ATTENTION:  # the model already has the registered attention
            own = "eager"
        set_attention(model, own)
        logger.info("%s keeps its own attention (%s): %s", type(model).__name__, own, error)
    return model


def verify_packing(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that packed sequences give the outputs of padded sequences in the model's own attention.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the packed outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "packed", _packed, WITHOUT_PACKING, _Sequences(_PACKED_LENGTHS, _ALIKE))


def verify_division(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that tokens interact only in attention, and in the functions that `respect_borders` has wrapped.

    Their order in the row then has no effect if positions are given.

    Context parallelism needs this, because each rank holds only some of the tokens.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "divided", _shuffled, _WITHOUT_DIVISION)


def verify_shared_prompts(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that packed sequences with one copy of their prompt give the outputs of padded sequences.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "shared", _shared, sequences=_SHARED)


type _LayOut = Callable[[list[Tensor]], tuple[dict[str, Any], Callable[[Tensor], Tensor]]]
"""Function from segments to the arguments of a model, and to a function that sorts its outputs by token."""


@torch.no_grad()
def _verify(
    model: PreTrainedModel,
    forward: Forward,
    layout: str,
    lay_out: _LayOut,
    way_out: str = "",
    sequences: _Sequences = _TWO,
) -> None:
    name, lengths = type(model).__name__, sequences.lengths
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None:
        raise ConfigError(f"{name} uses chunked attention, which the registered attention does not support. {way_out}")
    device = next(model.parameters()).device
    tokens = (torch.arange(sum(lengths), device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    segments = list(tokens.split(list(lengths)))
    for number, equal in enumerate(sequences.alike):
        segments[number][:equal] = segments[number - 1][:equal]
    was_training = model.training
    model.eval()
    try:
        with _short_windows(model):
            model_inputs, in_order = lay_out(segments)
            ours = in_order(forward(model, model_inputs))
            set_attention(model, "eager")
            own = _rows_of(forward(model, _padded(segments)), lengths)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error} {way_out}") from error
    except (TypeError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name} does not take {layout} inputs ({error!r}). {way_out}") from error
    finally:
        set_attention(model, VARLEN_ATTENTION)
        model.train(was_training)
    worst = (ours - own).abs().max().item()
    allowed = (1e-4 if ours.dtype == torch.float32 else 3e-2) * own.abs().max().item()
    if not worst <= allowed:
        raise ConfigError(
            f"{name}: outputs for {layout} sequences differ from those of the same sequences padded, in the model's "
            f"own attention, by {worst:.2e} (allowed {allowed:.2e}): this architecture mixes {layout} sequences "
            f"outside attention, or masks it in a way that the registered one does not. {way_out}"
        )


def _padded(segments: list[Tensor]) -> dict[str, Any]:
    return {"input_ids": nn.utils.rnn.pad_sequence(segments, batch_first=True)}


def _rows_of(output: Tensor, lengths: Sequence[int] = _LENGTHS) -> Tensor:
    """Concatenate padded rows without their padding to `[N, ...]`."""
    return torch.cat([row[:length] for row, length in zip(output, lengths, strict=True)])


def _plain(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    return _padded(segments), _rows_of


def _packed(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    return packed_model_inputs(segments), lambda output: output[0]


def _shuffled(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Lay out one packed row in an order in which all neighbouring tokens are separated."""
    packed = packed_model_inputs(segments)
    order = torch.arange(sum(_LENGTHS), device=segments[0].device) * _STRIDE % sum(_LENGTHS)
    row = _Shuffled(order)
    shuffled = {key: packed[key][:, order] for key in ("input_ids", "position_ids")}
    return shuffled | {"divided_row": row}, lambda output: output[0][row.places]


def _shared(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    ids = nn.utils.rnn.pad_sequence(segments, batch_first=True)
    rows, lengths = range(len(segments)), _SHARED.lengths
    layout = share_prefixes(ids.cpu(), lengths, Prefixes(list(rows), list(_SHARED.alike)), round_to=1)
    model_inputs = {k: v.to(ids.device) if isinstance(v, Tensor) else v for k, v in layout.model_inputs.items()}
    row_of_token = torch.tensor(rows).repeat_interleave(torch.tensor(lengths))
    columns = torch.cat([torch.arange(length) for length in lengths])
    places = layout.places(row_of_token, columns).to(ids.device)
    return model_inputs, lambda output: output[0][places]


class _Shuffled:
    """The `DividedRow` of `_shuffled`, and its `RowExchange`, in which one rank has all heads."""

    ranks = 1

    def __init__(self, order: Tensor) -> None:
        first, total = _LENGTHS[0], sum(_LENGTHS)
        self.plan = AttentionPlan([Piece(0, first, 0, first), Piece(first, total, first, total)])
        self.places = order.argsort()
        self._order = order
        self.exchange, self.cu_seq_lens = self, torch.tensor([0, first, total], dtype=torch.int32)

    def to_heads(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        return x.index_select(tokens, self.places)

    def to_tokens(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        return x.index_select(tokens, self._order)

    def gathered(self, x: Tensor, tokens: int) -> Tensor:
        return x.index_select(tokens, self.places)

    def own_heads(self, per_head: Tensor) -> Tensor:
        return per_head

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, :, self.places], key[:, :, self.places], value[:, :, self.places]

    def leave(self, out: Tensor) -> Tensor:
        return out[:, :, self._order]

    def heads_of(self, per_head: Tensor) -> Tensor:
        return per_head


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Run a block with all sliding windows shortened to a few tokens, in configurations and in layers."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    owners: list[Any] = [*model.modules(), *{id(config): config for config in configs}.values()]
    windows = [(owner, owner.sliding_window) for owner in owners if getattr(owner, "sliding_window", None)]
    for owner, _ in windows:
        owner.sliding_window = _WINDOW
    try:
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


def attention_to_load(config: PolicyConfig) -> str | None:
    """Return the `attn_implementation` for loading a model, or None if the architecture chooses.

    Packed rows need the registered attention. A model that sees only a part of each row also needs it, because
    transformers would build the masks from that part alone.
    """
    registered = register_varlen_attention()  # always, because `choose_attention` may choose it later
    asked = config.dtensor_cfg
    partial_rows = asked.context_parallel_size > 1 or asked.sequence_parallel
    return registered if config.sequence_packing.enabled or partial_rows else None


def choose_attention(probe_model: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> str:
    """Return the name of an architecture's attention: the registered one if it does not change the outputs.

    Args:
        probe_model: an unsharded model of the architecture, with weights.
        forward: returns the outputs to compare.

    Raises:
        ConfigError: the registered attention is needed, and the architecture's outputs differ with it.
    """
    asked = config.dtensor_cfg
    packed, divided = config.sequence_packing.enabled, asked.context_parallel_size > 1
    use_registered_attention(probe_model, packed=packed, divided=divided, forward=forward)
    chosen: str = probe_model.config._attn_implementation
    if asked.sequence_parallel and chosen != VARLEN_ATTENTION:
        raise ConfigError(
            f"{type(probe_model).__name__} masks its attention in its own way, which is impossible with a part of "
            "each row. Set policy.dtensor_cfg.sequence_parallel=false for this model."
        )
    return chosen


def can_share_prompts(probe_model: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> bool:
    """Return whether packed rows may contain a single copy of a prompt that several sequences share.

    Return False if this is not configured, if context or pipeline parallelism is used, or if outputs would differ.

    Args:
        probe_model: the model, after `choose_attention`.
        forward: returns the outputs to compare.
    """
    packing, section = config.sequence_packing, config.dtensor_cfg
    divided = section.context_parallel_size > 1 or section.pipeline_parallel_size > 1
    if divided or not (packing.enabled and packing.share_prompts):
        return False
    try:
        verify_shared_prompts(probe_model, forward)
    except ConfigError as error:
        logger.info("Prompts are not shared: %s", error)
        return False
    return True


__all__ = [
    "attention_to_load",
    "can_share_prompts",
    "choose_attention",
    "use_registered_attention",
    "verify_division",
    "verify_packing",
]
