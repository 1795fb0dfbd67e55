"""Compute attention over the pieces of a plan.

`attend` uses the first kernel that supports the layer's scoring, fastest first: torch's varlen flash attention, the
`flash-attn` package if it is installed (`flash_attn`), and then, piece by piece, torch's scaled-dot-product attention,
or plain matrix products if scores are capped or the layer has sinks. Invariant: the choice changes only speed and
rounding.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.host.row_invariance import rows_are_alike
from nemo_rl.models.attention.blocks import attend_in_blocks
from nemo_rl.models.attention.flash_attn import Kernel, find_kernel
from nemo_rl.models.attention.plan import AttentionPlan, PieceRun, Scoring


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """Compute the attention of all pieces.

    Args:
        query: `[b, H, T, D]`.
        key: `[b, H_kv, T_k, D]`.
        value: `[b, H_kv, T_k, D_v]`.
        plan: the keys that each query sees, the same for all rows.
        scoring: the layer's scale, window, soft cap, sinks and dropout.

    Returns:
        `[b, H, T, D_v]`.
    """
    if rows_are_alike():
        return attend_in_blocks(query, key, value, plan, scoring)
    plan = plan.within(scoring.window)
    sees_all = scoring.window is None or scoring.window >= key.shape[2]
    plain = plan.is_one_triangle and scoring.is_plain and sees_all
    kernel = None if plain else find_kernel(query, key, value, scoring)
    if kernel is not None:
        return _in_one_call(kernel, query, key, value, plan, scoring)
    runs = plan.runs(key.shape[2]) if scoring.is_plain else None
    if runs is None:
        parts = [_attend_piece(q, k, v, scoring) for q, k, v in plan.cut(query, key, value)]
    else:
        parts = _run_by_run(runs, query, key, value, scoring)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _run_by_run(runs: Sequence[PieceRun], query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> list[Tensor]:
    """Compute adjacent pieces of equal size in one call, with the same bits in three quarters of the time."""
    queries = query.split([run.queries * run.pieces for run in runs], dim=2)
    keys, values = (tensor.split([run.keys * run.pieces for run in runs], dim=2) for tensor in (key, value))
    return [
        run.end_to_end(_attend_piece(run.stacked(q), run.stacked(k), run.stacked(v), scoring))
        for run, q, k, v in zip(runs, queries, keys, values, strict=True)
    ]


def _in_one_call(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """Call a varlen kernel with the pieces of all rows concatenated.

    Values that are narrower than keys (multi-head latent attention) are padded with zeros for the call.
    """
    rows, width = len(query), value.shape[-1]
    value = F.pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    laid_out = (query, plan.keys_in_a_row(key), plan.keys_in_a_row(value))
    flat_query, flat_key, flat_value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in laid_out)
    out = kernel(flat_query, flat_key, flat_value, plan.bounds(rows, query.device), scoring)
    return out[..., :width].unflatten(0, (rows, -1)).transpose(1, 2)


def _attend_piece(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return the `[b, H, t, D_v]` attention of one piece, whose last query sees its last key."""
    if not scoring.is_plain:
        return _explicit(query, key, value, scoring)
    return masked_attention(query, key, value, _mask(query, key, scoring), scoring)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute torch's scaled-dot-product attention for scores without soft cap and sinks.

    Args:
        query: `[b, H, t, D]`.
        key: `[b, H_kv, n, D]`.
        value: `[b, H_kv, n, D_v]`.
        mask: keys that each query sees, as bool of a shape that broadcasts to `[b, H, t, n]`. None for as many queries
            as keys, of which each query sees those up to its own.
        scoring: the layer's scale and dropout.

    Returns:
        `[b, H, t, D_v]`.
    """
    widens = query.dtype == torch.bfloat16 and query.device.type == "cpu" and _is_faster_in_float32()
    wide = torch.float32 if widens else query.dtype
    out = F.scaled_dot_product_attention(
        query.to(wide),
        key.to(wide),
        value.to(wide),
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.to(query.dtype)


@cache
def _is_faster_in_float32() -> bool:
    """Return whether torch's attention is slower in bfloat16 than in float32 on this processor.

    Without AMX, its backward pass multiplies small bfloat16 matrices one number at a time. With 9 heads of 64, forward
    and backward pass of 40, 80, 160 and 320 tokens take 1.6, 2.7, 6.1 and 13.8 ms in bfloat16, and 0.4, 1.0, 3.8 and
    12.0 ms in float32 with the conversions.
    """
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2")) and not has.get("amx_bf16")


def _mask(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor | None:
    """Return a `[t, t_k]` bool mask of the keys that each query sees, or None for plain causal attention."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and (scoring.window is None or scoring.window >= keys):
        return None
    position = torch.arange(keys, device=query.device)
    return scoring.sees(position[keys - queries :, None] - position[None, :])


def _explicit(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention by its definition, with capped scores and sinks. All scores of the piece are in memory.

    `weight_j = exp(s_j) / (sum_k exp(s_k) + exp(sink))`: the sink is an additional column of the softmax, which is
    removed afterwards. As in grouped-query attention, consecutive query heads share a key head.
    """
    shared = (key.shape[1], query.shape[1] // key.shape[1])
    grouped = query.unflatten(1, shared)
    scores = scoring.capped(grouped @ key[:, :, None].transpose(-1, -2) * scoring.scale(query))
    mask = _mask(query, key, scoring)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, *shared, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
    weights = F.dropout(weights, scoring.dropout) if scoring.dropout else weights
    return (weights @ value[:, :, None]).flatten(1, 2)
