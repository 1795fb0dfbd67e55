"""Define the attention function that transformers calls, for padded, packed and divided rows and for cached tokens.

The function is registered as `VARLEN_ATTENTION`. Keyword arguments of the model's forward say which tokens belong
together: `cu_seq_lens_q` for packed rows (`models.training.inputs`), `divided_row` for rows that several ranks share,
or `cached_pass` for tokens whose predecessors are in a cache.

Invariant: token i of a sequence attends only to tokens j <= i of the same sequence within the layer's sliding window.
Unsupported arguments are refused. The layer's window replaces its mask (`_window_mask`), because some architectures do
not pass the window as a separate argument.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, PackedRow, Scoring, plan_of_row
from nemo_rl.utils.errors import ConfigError

VARLEN_ATTENTION = "nemo_rl_varlen"
_WITHOUT_EFFECT = ("cache_position", "cu_seq_lens_k", "position_ids", "seq_idx")
"""Tensors that models pass to every attention function, and that change no score. All others are refused, because a
bias or a choice of keys (`block_indices` of MiniMax-M3) that is left out may only show in rows longer than a test's."""


class DividedRow(Protocol):
    """A row whose tokens are on other ranks or in another order than attention needs."""

    plan: AttentionPlan
    """The pieces of the row, as positions in the tensors that `enter` returns."""

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Redistribute query, key and value `[b, H, t, D]` over the ranks, and order their tokens as `plan` expects."""

    def leave(self, out: Tensor) -> Tensor:
        """Move the output `[b, H, T, D]` back to the queries' ranks and order."""

    def heads_of(self, per_head: Tensor) -> Tensor:
        """Select the entries of a per-head tensor `[H]` for the heads that `enter` returns."""


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    divided_row: DividedRow | None = None,
    cached_pass: CachedPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment of a packed row, or within each row that is not packed.

    transformers calls attention functions with this signature.

    Args:
        module: the attention layer.
        query: `[b, H, T, D]`; b is 1 for packed rows.
        key: `[b, H_kv, T, D]`.
        value: `[b, H_kv, T, D_v]`.
        attention_mask: the result of `_window_mask`, which is the layer's window as a 0-d int64 tensor, or None. It
            contains no segment boundaries. They are in `cu_seq_lens_q` or `divided_row`.
        dropout: attention dropout probability.
        scaling: factor of the scores; if None, `D ** -0.5`.
        softcap: bound of the scores; see `Scoring`.
        s_aux: `[H]` attention sinks; see `Scoring`.
        cu_seq_lens_q: `[S + 1]` int32 segment boundaries in the packed row; None for plain rows.
        max_length_q: length of the longest segment.
        divided_row: a row that is divided over ranks: its segments, and functions that move its tokens.
        cached_pass: new tokens of an engine's sequences, and the cache with the earlier ones.
        **kwargs: other arguments of the model; tensors are refused, because they may change the scores.

    Returns:
        `([b, T, H, D_v] output, None)`.

    Raises:
        ConfigError: the layer passes an argument that this attention does not support.
    """
    _refuse_unsupported(module, attention_mask, kwargs)
    window = None if attention_mask is None else int(attention_mask)
    scoring = Scoring(scaling, window, softcap, s_aux, dropout)
    if divided_row is not None:
        if s_aux is not None:
            scoring = replace(scoring, sinks=divided_row.heads_of(s_aux))
        out = attend(*divided_row.enter(query, key, value), divided_row.plan, scoring)
        out = divided_row.leave(out)
    elif cached_pass is not None:
        layer: Any = module
        q_T1, k_T1, v_T1 = (each.permute(2, 0, 1, 3) for each in (query, key, value))
        out_T1 = cached_pass.attend(layer.layer_idx, q_T1, k_T1, v_T1, scoring)
        return out_T1.transpose(0, 1).unflatten(2, (query.shape[1], -1)), None
    elif cu_seq_lens_q is not None:
        out = attend(query, key, value, PackedRow(cu_seq_lens_q, max_length_q), scoring)
    else:
        out = attend(query, key, value, plan_of_row(query.shape[2]), scoring)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    given = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _WITHOUT_EFFECT]
    if attention_mask is not None and attention_mask.dim() > 0:
        given.append("a mask of its own")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        given.append("is_causal=False")
    if given:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(given)} to its attention, which causal attention within "
            "sequences does not support."
        )


def _window_mask(*, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """Return a layer's sliding window instead of its mask. transformers calls this to make the mask."""
    return None if local_size is None else torch.tensor(local_size)


def register_varlen_attention() -> str:
    """Register the function with transformers, and return its name for `attn_implementation`."""
    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _window_mask)
    return VARLEN_ATTENTION
