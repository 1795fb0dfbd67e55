"""Check on the model itself that the registered attention gives the same outputs as the model's own attention.

Two sequences are scored padded by the model's own attention and then in the layout of training: packed, padded, or
divided. This finds masks that hold more than causality and windows, and interactions of tokens outside attention:
state-space or convolution layers, masks built inside the model, positions not taken from `position_ids`.
Invariant: the attention used in training has passed the check; windows are shortened for it, so that the few tokens
of the check reach beyond them.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.models.attention.plan import AttentionPlan, Piece
from nemo_rl.models.dtensor.attention.function import VARLEN_ATTENTION, register_varlen_attention
from nemo_rl.models.huggingface.load import WITHOUT_PACKING
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.models.training.shared_prefixes import share_prefixes
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Forward = Callable[[PreTrainedModel, dict[str, Any]], Tensor]
"""Maps a model and its inputs to the `[b, T, ...]` outputs that are compared."""

_LENGTHS = (11, 9)
_ALIKE = 5
"""Number of tokens at the start that both sequences share."""
_STRIDE = 7
_WINDOW = 4
_WITHOUT_DIVISION = "Set policy.dtensor_cfg.context_parallel_size=1 for this model."


def logits(model: PreTrainedModel, model_inputs: dict[str, Any]) -> Tensor:
    """Return the `[b, T, V]` logits of a language model."""
    return model(**model_inputs, use_cache=False).logits


def use_registered_attention(
    model: PreTrainedModel, *, packed: bool, divided: bool, forward: Forward = logits
) -> PreTrainedModel:
    """Set the registered attention on a model; keep the model's own if outputs differ and nothing needs the other.

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
        model.set_attn_implementation(register_varlen_attention())
        if packed:
            verify_packing(model, forward)
        if divided:
            verify_division(model, forward)
        if not (packed or divided):
            _verify(model, forward, "padded", _plain)
    except ConfigError as error:
        if packed or divided:
            raise
        if own == VARLEN_ATTENTION:  # loaded with it
            own = "eager"
        model.set_attn_implementation(own)
        logger.info("%s keeps its own attention (%s): %s", type(model).__name__, own, error)
    return model


def verify_packing(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that packed sequences score like padded sequences in the model's own attention.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the packed outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "packed", _packed, WITHOUT_PACKING)


def verify_division(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that tokens interact in attention only: given positions, their order in the row does not matter.

    Context parallelism needs this, because each rank holds only some of the tokens.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "divided", _shuffled, _WITHOUT_DIVISION)


def verify_shared_prompts(model: PreTrainedModel, forward: Forward = logits) -> None:
    """Check that packed sequences with one copy of their prompt score like padded sequences.

    Args:
        model: the unsharded model, with `attn_implementation=VARLEN_ATTENTION`.
        forward: returns the outputs to compare; logits by default.

    Raises:
        ConfigError: the outputs differ, or the model's forward does not accept the arguments.
    """
    _verify(model, forward, "shared", _shared)


type _LayOut = Callable[[list[Tensor]], tuple[dict[str, Any], Callable[[Tensor], Tensor]]]
"""Maps segments to a model's arguments and to a function that puts its outputs into the order of the tokens."""


@torch.no_grad()
def _verify(model: PreTrainedModel, forward: Forward, layout: str, lay_out: _LayOut, way_out: str = "") -> None:
    name = type(model).__name__
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None:
        raise ConfigError(f"{name} uses chunked attention, which the registered attention does not know. {way_out}")
    device = next(model.parameters()).device
    tokens = (torch.arange(sum(_LENGTHS), device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    tokens[_LENGTHS[0] :][:_ALIKE] = tokens[:_ALIKE]
    segments = list(tokens.split(_LENGTHS))
    was_training = model.training
    model.eval()
    try:
        with _short_windows(model):
            model_inputs, in_order = lay_out(segments)
            ours = in_order(forward(model, model_inputs))
            model.set_attn_implementation("eager")
            own = _rows_of(forward(model, _padded(segments)))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error} {way_out}") from error
    except (TypeError, AttributeError, IndexError, KeyError) as error:
        raise ConfigError(f"{name} does not take {layout} inputs ({error!r}). {way_out}") from error
    finally:
        model.set_attn_implementation(VARLEN_ATTENTION)
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


def _rows_of(output: Tensor) -> Tensor:
    """Concatenate padded rows without their padding to `[N, ...]`."""
    return torch.cat([row[:length] for row, length in zip(output, _LENGTHS, strict=True)])


def _plain(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    return _padded(segments), _rows_of


def _packed(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    return packed_model_inputs(segments), lambda output: output[0]


def _shuffled(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Lay out one packed row in an order in which no two neighbouring tokens stay next to each other."""
    packed = packed_model_inputs(segments)
    order = torch.arange(sum(_LENGTHS), device=segments[0].device) * _STRIDE % sum(_LENGTHS)
    row = _Shuffled(order)
    shuffled = {key: packed[key][:, order] for key in ("input_ids", "position_ids")}
    return shuffled | {"divided_row": row}, lambda output: output[0][row.places]


def _shared(segments: list[Tensor]) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    ids = nn.utils.rnn.pad_sequence(segments, batch_first=True)
    layout = share_prefixes(ids.cpu(), _LENGTHS, Prefixes([0, 1], [0, _ALIKE]), round_to=1)
    model_inputs = {k: v.to(ids.device) if isinstance(v, Tensor) else v for k, v in layout.model_inputs.items()}
    rows = torch.arange(2).repeat_interleave(torch.tensor(_LENGTHS))
    columns = torch.cat([torch.arange(length) for length in _LENGTHS])
    places = layout.places(rows, columns).to(ids.device)
    return model_inputs, lambda output: output[0][places]


class _Shuffled:
    """The `DividedRow` of `_shuffled`."""

    def __init__(self, order: Tensor) -> None:
        first, total = _LENGTHS[0], sum(_LENGTHS)
        self.plan = AttentionPlan([Piece(0, first, 0, first), Piece(first, total, first, total)])
        self.places = order.argsort()
        self._order = order

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
