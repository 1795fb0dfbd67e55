"""Attention that never crosses the boundary between sequences packed into one row.

Registered with transformers under `VARLEN_ATTENTION`; the model's forward carries `cu_seq_lens_q`
down to it. `models.inputs` builds the packed rows, `models.huggingface.load`
selects this implementation when packing is on.

Invariant: token i of a segment attends to tokens j <= i of the same segment, within the layer's sliding
window, and to nothing else; what cannot be honoured is refused, not approximated. A layer's window is the one
in its mask, as in the attention functions of transformers: not every architecture passes it beside the mask.

Three kernels: torch's varlen flash attention for half precision on GPUs; one scaled-dot-product call
per segment elsewhere (exact, and its cost does not grow with the length of the pack); and, for rows
that are not packed, one causal scaled-dot-product call per batch.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface.load import WITHOUT_PACKING
from nemo_rl.models.inputs import packed_model_inputs
from nemo_rl.utils.errors import ConfigError

VARLEN_ATTENTION = "nemo_rl_varlen"
_REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")
_MAX_FLASH_HEAD_DIM = 256
_FLASH_HEAD_DIM_MULTIPLE = 8
_FLASH_CAPABILITY = (8, 0)
_PROBE_LENGTHS = (11, 9)
_PROBE_WINDOW = 4


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed row, or inside each row if not packed.

    The signature is the one transformers calls attention functions with.

    Args:
        module: the attention layer.
        query: `[b, H, T, D]`; b is 1 for packed rows.
        key: `[b, H_kv, T, D]`.
        value: `[b, H_kv, T, D_v]`.
        attention_mask: what `_window_mask` made: the layer's window, 0-d int64, or None; boundaries come from
            `cu_seq_lens_q`.
        dropout: attention dropout probability.
        scaling: factor on the scores; None means `D ** -0.5`.
        cu_seq_lens_q: `[S + 1]` int32 segment boundaries in the packed row; None for plain rows.
        max_length_q: length of the longest segment.
        **kwargs: other arguments of the model; those that change the scores are refused.

    Returns:
        `([b, T, H, D_v] output, None)`.

    Raises:
        ConfigError: the layer asks for something this attention cannot honour.
    """
    _refuse_unsupported(module, attention_mask, kwargs)
    window = None if attention_mask is None else int(attention_mask)
    if cu_seq_lens_q is None:
        return _causal(query, key, value, dropout, scaling, window).transpose(1, 2), None
    if _flash_can_run(query, key, value, dropout):
        out = _flash_segments(query, key, value, scaling, window, cu_seq_lens_q, max_length_q)
        return out[None], None
    # Split, not sliced: the gradient of a slice is as long as the row, that of all parts of a split together.
    lengths = cu_seq_lens_q.diff().tolist()
    segments = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    parts = [_causal(q, k, v, dropout, scaling, window) for q, k, v in segments]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _refuse_unsupported(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    given = [name for name in _REFUSED_ARGUMENTS if kwargs.get(name) is not None]
    if attention_mask is not None and attention_mask.dim() > 0:
        given.append("a mask of its own")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        given.append("is_causal=False")
    if given:
        raise ConfigError(
            f"{type(module).__name__} asks its attention for {', '.join(given)}, which packed attention "
            f"cannot honour. {WITHOUT_PACKING}"
        )


def _causal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """`[b, H, t, D_v]` causal attention of rows that start at position 0."""
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _flash_can_run(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's varlen kernel takes these tensors: what it refuses goes segment by segment."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and head_dim == value.shape[-1] <= _MAX_FLASH_HEAD_DIM
        and head_dim % _FLASH_HEAD_DIM_MULTIPLE == 0
        and dropout == 0.0
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


def _flash_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    cu_seq_lens: Tensor,
    max_length: int | None,
) -> Tensor:
    """`[T, H, D]` attention of all segments in one flash-attention call."""
    # Imported with the first call: it brings torch's compiler along, two seconds that a CPU run does without.
    from torch.nn.attention.varlen import varlen_attn

    longest = max_length if max_length is not None else int(cu_seq_lens.diff().max())
    left = -1 if window is None or window >= longest else window - 1
    gqa: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _asks_for_gqa(varlen_attn) else {}
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        **gqa,
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _asks_for_gqa(kernel: Callable[..., Any]) -> bool:
    """Whether shared key heads are announced: torch 2.11 shares them and knows no such argument."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _window_mask(*, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """The mask function that goes with `varlen_attention`: of a layer's mask it keeps the window.

    Args:
        local_size: the window, in tokens; None for full attention.
        **kwargs: sizes of the batch and the mask as a function, which transformers passes as well.
    """
    return None if local_size is None else torch.tensor(local_size)


def register_varlen_attention() -> str:
    """Make the implementation known to transformers; returns its name for `attn_implementation`."""
    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _window_mask)
    return VARLEN_ATTENTION


def _logits(model: PreTrainedModel, model_inputs: dict[str, Any]) -> Tensor:
    return model(**model_inputs, use_cache=False).logits


@torch.no_grad()
def verify_packing(
    model: PreTrainedModel, forward: Callable[[PreTrainedModel, dict[str, Any]], Tensor] = _logits
) -> None:
    """Check that two packed sequences score as they do padded, in the model's own attention.

    Catches what an architecture's mask holds beyond causality and windows, and every way to leak across a
    boundary: state-space or convolution layers, masks built inside the model, positions not taken from
    `position_ids`. Windows are shortened for the check, so that the few tokens reach beyond them.

    Args:
        model: the unsharded model, or a small twin of it, made with `attn_implementation=VARLEN_ATTENTION`.
        forward: model and its inputs to the `[b, T, ...]` outputs that are compared; logits by default.

    Raises:
        ConfigError: the packed outputs differ, or the model's forward does not accept the arguments.
    """
    name = type(model).__name__
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None:
        raise ConfigError(f"{name} uses chunked attention, which packing does not support. {WITHOUT_PACKING}")
    device = next(model.parameters()).device
    tokens = (torch.arange(sum(_PROBE_LENGTHS), device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    segments = list(tokens.split(_PROBE_LENGTHS))
    was_training = model.training
    model.eval()
    try:
        with _short_windows(model):
            packed = forward(model, packed_model_inputs(segments))[0]
            model.set_attn_implementation("eager")
            padded = forward(model, {"input_ids": nn.utils.rnn.pad_sequence(segments, batch_first=True)})
    except (TypeError, AttributeError, IndexError, KeyError) as error:
        raise ConfigError(f"{name} does not take packed inputs ({error!r}). {WITHOUT_PACKING}") from error
    finally:
        model.set_attn_implementation(VARLEN_ATTENTION)
        model.train(was_training)
    own = torch.cat([row[:length] for row, length in zip(padded, _PROBE_LENGTHS, strict=True)])
    worst = (packed - own).abs().max().item()
    allowed = (1e-4 if packed.dtype == torch.float32 else 3e-2) * own.abs().max().item()
    if not worst <= allowed:
        raise ConfigError(
            f"{name}: outputs for packed sequences differ from those of the same sequences padded by {worst:.2e} "
            f"(allowed {allowed:.2e}): this architecture mixes packed sequences, or masks its attention in a way "
            f"that packing does not. {WITHOUT_PACKING}"
        )


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Run a block with all sliding windows a few tokens long, in configurations and in layers."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    owners: list[Any] = [*model.modules(), *{id(config): config for config in configs}.values()]
    windows = [(owner, owner.sliding_window) for owner in owners if getattr(owner, "sliding_window", None)]
    for owner, _ in windows:
        owner.sliding_window = _PROBE_WINDOW
    try:
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window
