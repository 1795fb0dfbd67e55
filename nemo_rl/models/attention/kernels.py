"""Attention over the pieces of a plan, by the fastest kernel that computes exactly what the layer asks for.

In this order: torch's varlen flash attention, the `flash-attn` package where it is installed (`varlen`), and piece by
piece torch's scaled-dot-product attention, or plain matrix products where scores are capped or a layer has sinks.
Invariant: the choice changes speed and rounding only; what a kernel does not offer goes to the next one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.models.attention.plan import AttentionPlan, Run, Scoring
from nemo_rl.models.attention.varlen import Kernel, find_kernel


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """Attention of all pieces.

    Args:
        query: `[b, H, T, D]`.
        key: `[b, H_kv, T_k, D]`.
        value: `[b, H_kv, T_k, D_v]`.
        plan: which keys each query sees, the same for all rows.
        scoring: what else the layer asks for.

    Returns:
        `[b, H, T, D_v]`.
    """
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


def _run_by_run(runs: Sequence[Run], query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> list[Tensor]:
    """Pieces of one size in one call: the same bits as one by one, in three quarters of the time."""
    queries = query.split([run.queries * run.pieces for run in runs], dim=2)
    keys, values = (tensor.split([run.keys * run.pieces for run in runs], dim=2) for tensor in (key, value))
    return [
        run.end_to_end(_attend_piece(run.stacked(q), run.stacked(k), run.stacked(v), scoring))
        for run, q, k, v in zip(runs, queries, keys, values, strict=True)
    ]


def _in_one_call(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """All rows and pieces laid end to end; values shorter than keys (MLA) are filled with zeros for the call."""
    rows, width = len(query), value.shape[-1]
    value = F.pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    laid_out = (query, plan.keys_in_a_row(key), plan.keys_in_a_row(value))
    flat_query, flat_key, flat_value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in laid_out)
    out = kernel(flat_query, flat_key, flat_value, plan.bounds(rows, query.device), scoring)
    return out[..., :width].unflatten(0, (rows, -1)).transpose(1, 2)


def _attend_piece(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """`[b, H, t, D_v]` attention of queries whose last one sees the last key."""
    if not scoring.is_plain:
        return _explicit(query, key, value, scoring)
    mask = _mask(query, key, scoring.window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _mask(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """`[t, t_k]` bool: what each query sees; None for all keys up to its own of as many keys as queries."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and (window is None or window >= keys):
        return None
    position = torch.arange(keys, device=query.device)
    distance = position[keys - queries :, None] - position[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _explicit(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention by its definition, with capped scores and sinks; holds all scores of the piece.

    `weight_j = exp(s_j) / (sum_k exp(s_k) + exp(sink))`: the sink is one more column of the softmax, left out after.
    Key heads are shared as in grouped-query attention: consecutive query heads see the same one.
    """
    shared = (key.shape[1], query.shape[1] // key.shape[1])
    grouped = query.unflatten(1, shared)
    scale = scoring.scaling if scoring.scaling is not None else query.shape[-1] ** -0.5
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    mask = _mask(query, key, scoring.window)
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
