"""The attention function that transformers calls, registered under `VARLEN_ATTENTION`.

Invariant: token i of a sequence attends to tokens j <= i of the same sequence, within the layer's sliding window, and
to nothing else; unsupported arguments are refused, not approximated. A layer's window is read from its mask, as in the
attention functions of transformers, because not every architecture passes it as a separate argument.

Keyword arguments of the model's forward say which tokens belong together: `cu_seq_lens_q` for packed rows
(`models.training.inputs`), or `divided_row` for rows that several ranks share.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, PackedRow, Scoring, plan_of_row
from nemo_rl.utils.errors import ConfigError

VARLEN_ATTENTION = "nemo_rl_varlen"
_REFUSED_ARGUMENTS = ("position_bias", "head_mask")


class DividedRow(Protocol):
    """A row whose tokens are on other ranks, or in another order, than attention needs."""

    plan: AttentionPlan
    """The pieces, in positions of the tensors that `enter` returns."""

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move `[b, H, t, D]` to the ranks and the order of the plan."""

    def leave(self, out: Tensor) -> Tensor:
        """Move the output `[b, H, T, D]` back to the ranks and the order of the queries."""

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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each segment of a packed row, or inside each row if not packed.

    The signature is the one with which transformers calls attention functions.

    Args:
        module: the attention layer.
        query: `[b, H, T, D]`; b is 1 for packed rows.
        key: `[b, H_kv, T, D]`.
        value: `[b, H_kv, T, D_v]`.
        attention_mask: result of `_window_mask`: the layer's window, 0-d int64, or None; segment boundaries come
            from `cu_seq_lens_q` or `divided_row`.
        dropout: attention dropout probability.
        scaling: factor on the scores; None means `D ** -0.5`.
        softcap: bound of the scores; see `Scoring`.
        s_aux: `[H]` attention sinks; see `Scoring`.
        cu_seq_lens_q: `[S + 1]` int32 segment boundaries in the packed row; None for plain rows.
        max_length_q: length of the longest segment.
        divided_row: moves the tokens of a row that ranks divide, and holds its segments.
        **kwargs: other arguments of the model; arguments that change the scores are refused.

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
    elif cu_seq_lens_q is not None:
        out = attend(query, key, value, PackedRow(cu_seq_lens_q, max_length_q), scoring)
    else:
        out = attend(query, key, value, plan_of_row(query.shape[2]), scoring)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    given = [name for name in _REFUSED_ARGUMENTS if kwargs.get(name) is not None]
    if attention_mask is not None and attention_mask.dim() > 0:
        given.append("a mask of its own")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        given.append("is_causal=False")
    if given:
        raise ConfigError(
            f"{type(module).__name__} asks its attention for {', '.join(given)}, which causal attention within "
            "sequences cannot honour."
        )


def _window_mask(*, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """Return the window of a layer's mask; the mask function registered with `varlen_attention`.

    Args:
        local_size: the window, in tokens; None for full attention.
        **kwargs: sizes of the batch and the mask as a function, which transformers also passes; ignored.
    """
    return None if local_size is None else torch.tensor(local_size)


def register_varlen_attention() -> str:
    """Register the implementation with transformers; return its name for `attn_implementation`."""
    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _window_mask)
    return VARLEN_ATTENTION
