"""Compute log-probabilities and entropies of tokens and their gradients, chunk by chunk.

Each rank reduces over its own part of the vocabulary. The ranks' results are joined once, at the end of the forward
pass. Except for filters, the backward pass needs no communication, because it has the sums over the whole vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_rl.distributed.parallel_logprobs.density import (
    SamplingDensity,
    columns,
    log_normalizer,
    logits_of_density,
)
from nemo_rl.distributed.parallel_logprobs.fusion import fused_on_gpu
from nemo_rl.distributed.parallel_logprobs.head import (
    PLAIN,
    HeadUpdate,
    LogitTransform,
    OutputHead,
    default_chunk_size,
    widen,
)
from nemo_rl.distributed.ranks.collectives import Group, all_gather, all_reduce


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    density: SamplingDensity | None = None,
    bias_V: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    group: Group = None,
    chunk_size: int | None = None,
    update: HeadUpdate | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of one or several targets of each token, and the entropy of its distribution.

    With `x = transform(h W^T + b) / temperature`, restricted to the tokens the sampler kept:
    `logprob = x[target] - logsumexp(x)` and `entropy = -sum_v p_v log p_v`. Both are differentiable
    in `hidden_ND`, `weight_VD`, `bias_V` and `update`; logits are recomputed chunk by chunk in the backward pass.

    A target that the filter would exclude is kept in the density, because the sampler did draw it: only rounding
    differences between the logits of sampler and trainer can exclude it. Its log-probability stays finite.

    With a group, every rank passes the same hidden states and targets, and gets the same results. The gradients of
    `weight_VD` and `bias_V` are those of the rank's rows. The gradient of `hidden_ND` is PARTIAL: its sum over the
    ranks is the complete gradient (`collectives.reduce_gradient`).

    Args:
        hidden_ND: `[N, D]` hidden states that predict the targets.
        weight_VD: `[V, D]` output head; with a group this rank's rows, contiguous blocks of equal size in rank order.
        targets_N: `[N]` int64 token ids of the whole vocabulary, or `[N, k]` with k ids at each token.
        density: temperature and filters; if None, the plain softmax.
        bias_V: `[V]` bias of these rows.
        transform: function that the model applies to the linear layer's output.
        group: the ranks that divide the head; None if this rank has the whole head.
        chunk_size: tokens per chunk of logits; if None, `default_chunk_size`.
        update: low-rank update of the head's product, for undivided heads only.

    Returns:
        `(logprobs, entropy_N)`, float32 (float64 for float64 inputs); `logprobs` has the shape of the targets.
    """
    assert update is None or group is None, "ranks do not divide a head with an update"
    density = density or SamplingDensity()
    chunk_size = chunk_size or default_chunk_size(on_gpu=hidden_ND.is_cuda)
    inner, rows = (None, None) if update is None else update
    return _ChunkedTokenLogprobs.apply(
        hidden_ND, weight_VD, bias_V, inner, rows, targets_N, transform, group, density, chunk_size
    )


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, *, density: SamplingDensity | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` from given logits, for heads that `LogitTransform` does not describe.

    Args:
        logits_NV: `[N, V]` unscaled logits.
        targets_N: `[N]` int64 token ids, or `[N, k]`.
        density: temperature and filters; if None, the plain softmax.

    Returns:
        As in `token_logprobs`.
    """
    density = density or SamplingDensity()
    x_NV = logits_of_density(widen(logits_NV), targets_N, density, None)
    target_Nk, lse_N, mean_N = _statistics(x_NV, columns(targets_N))
    return (target_Nk - lse_N[:, None]).view(targets_N.shape), lse_N - mean_N


def _statistics(x_nV: Tensor, columns_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits in the columns `[n, k]`, `logsumexp(x)` `[n]`, and the mean of x under `softmax(x)` `[n]`."""
    lse_n = log_normalizer(x_nV)
    p_nV = (x_nV - lse_n[:, None]).exp()
    # # A filtered token has p = 0 and x = -inf. The limit of its term p*x is 0.
    return x_nV.gather(-1, columns_nk), lse_n, torch.where(p_nV > 0, p_nV * x_nV, 0.0).sum(dim=-1)


def _over_all_ranks(
    target_Nk: Tensor, lse_N: Tensor, mean_N: Tensor, here_Nk: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the `_statistics` of all ranks into those of the whole vocabulary. Means are weighted by probability."""
    target_Nk = all_reduce(target_Nk.where(here_Nk, 0.0), group)
    parts_r2N = all_gather(torch.stack([lse_N, mean_N])[None], 0, group, partial_gradient=False)
    lse_rN, mean_rN = parts_r2N.unbind(1)
    whole_lse_N = torch.logsumexp(lse_rN, dim=0)
    return target_Nk, whole_lse_N, ((lse_rN - whole_lse_N).exp() * mean_rN).sum(dim=0)


def _grad_logits(
    x_nV: Tensor, lse_n: Tensor, grad_logprob_nk: Tensor, entropy_n: Tensor, grad_entropy_n: Tensor | None
) -> Tensor:
    """Return the gradient of `g_l * logprob + g_h * entropy` with respect to x, without the targets' own terms.

    This is `-g_l p - g_h p (log p + H)`, summed over targets. The caller adds `g_l` at each target.
    """
    log_p_nV = x_nV - lse_n[:, None]
    p_nV = log_p_nV.exp()
    grad_x_nV = p_nV * -grad_logprob_nk.sum(dim=-1, keepdim=True)
    if grad_entropy_n is not None:
        log_p_nV = torch.where(p_nV > 0, log_p_nV, 0.0)
        grad_x_nV -= grad_entropy_n[:, None] * p_nV * (log_p_nV + entropy_n[:, None])
    return grad_x_nV


class _ChunkedTokenLogprobs(torch.autograd.Function):
    """Implement `token_logprobs`, saving hidden states, weights and few numbers per token, and recomputing logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        inner_NR: Tensor | None,
        rows_VR: Tensor | None,
        targets_N: Tensor,
        transform: LogitTransform,
        group: Group,
        density: SamplingDensity,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        head = OutputHead(weight_VD, bias_V, transform, group)
        columns_Nk, here_Nk = head.locate(columns(targets_N))
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        target_Nk = hidden_ND.new_empty(columns_Nk.shape, dtype=wide)
        lse_N, mean_N = hidden_ND.new_empty((2, hidden_ND.shape[0]), dtype=wide)
        statistics = fused_on_gpu(_statistics, hidden_ND)
        for start in range(0, hidden_ND.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            y_nV = head.logits(hidden_ND[part], _update(inner_NR, rows_VR, part))
            x_nV = logits_of_density(y_nV, targets_N[part], density, group)
            target_Nk[part], lse_N[part], mean_N[part] = statistics(x_nV, columns_Nk[part])
        if here_Nk is not None:
            target_Nk, lse_N, mean_N = _over_all_ranks(target_Nk, lse_N, mean_N, here_Nk, group)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, inner_NR, rows_VR, targets_N, lse_N, mean_N)
        ctx.transform, ctx.group, ctx.density, ctx.chunk_size = transform, group, density, chunk_size
        ctx.set_materialize_grads(False)
        return (target_Nk - lse_N[:, None]).view(targets_N.shape), lse_N - mean_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, inner_NR, rows_VR, targets_N, lse_N, mean_N = ctx.saved_tensors
        head = OutputHead(weight_VD, bias_V, ctx.transform, ctx.group)
        columns_Nk, here_Nk = head.locate(columns(targets_N))
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(targets_N, dtype=lse_N.dtype)
        grad_logprobs_Nk = columns(grad_logprobs_N)
        grad_targets_Nk = grad_logprobs_Nk if here_Nk is None else grad_logprobs_Nk * here_Nk
        if grad_entropy_N is not None and not grad_entropy_N.is_cuda and not grad_entropy_N.any():
            grad_entropy_N = None  # only on CPUs, as the check would wait for a GPU
        gradients = _Gradients(ctx, head, hidden_ND, None if inner_NR is None else HeadUpdate(inner_NR, rows_VR))
        grad_logits = fused_on_gpu(_grad_logits, hidden_ND)
        for start in range(0, hidden_ND.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            y_nV = head.logits(hidden_ND[part], _update(inner_NR, rows_VR, part))
            x_nV = logits_of_density(y_nV, targets_N[part], ctx.density, ctx.group)
            if ctx.transform.cap is None:
                y_nV = x_nV  # frees y
            grad_entropy_n = None if grad_entropy_N is None else grad_entropy_N[part]
            entropy_n = lse_N[part] - mean_N[part]
            grad_x_nV = grad_logits(x_nV, lse_N[part], grad_logprobs_Nk[part], entropy_n, grad_entropy_n)
            grad_x_nV = grad_x_nV.scatter_add_(-1, columns_Nk[part], grad_targets_Nk[part])
            if ctx.density.temperature != 1.0:
                grad_x_nV = grad_x_nV.div_(ctx.density.temperature)
            gradients.add(part, ctx.transform.backward_(grad_x_nV, y_nV))
        return *gradients.results(), None, None, None, None, None


def _update(inner_NR: Tensor | None, rows_VR: Tensor | None, part: slice) -> HeadUpdate | None:
    """Return the update of a chunk of tokens, or None without an update."""
    return None if inner_NR is None or rows_VR is None else HeadUpdate(inner_NR[part], rows_VR)


class _Gradients:
    """The requested gradients of the head's inputs and parameters, summed over tokens in float32 or wider."""

    def __init__(self, ctx: Any, head: OutputHead, hidden_ND: Tensor, update: HeadUpdate | None) -> None:
        wide = torch.promote_types(head.weight_VD.dtype, torch.float32)
        self._head, self._hidden_ND = head, hidden_ND
        self._hidden = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        self._weight = torch.zeros_like(head.weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        self._bias: Tensor | None = None
        if head.bias_V is not None and ctx.needs_input_grad[2]:
            self._bias = torch.zeros_like(head.bias_V, dtype=wide)
        self._update = update
        self._inner: Tensor | None = None
        self._rows: Tensor | None = None
        if update is not None:
            self._inner = torch.zeros_like(update.inner_NR) if ctx.needs_input_grad[3] else None
            self._rows = torch.zeros_like(update.weight_VR, dtype=wide) if ctx.needs_input_grad[4] else None

    def add(self, part: slice, grad_x_nV: Tensor) -> None:
        """Add the gradients of the linear layer for a chunk."""
        h_nD = self._hidden_ND[part]
        if self._bias is not None:
            self._bias += grad_x_nV.sum(dim=0)
        grad_x_nV = grad_x_nV.to(h_nD.dtype)
        if self._hidden is not None:
            self._hidden[part] = grad_x_nV @ self._head.weight_VD
        if self._weight is not None:
            self._weight += grad_x_nV.t() @ h_nD
        if self._update is not None:
            if self._inner is not None:
                self._inner[part] = grad_x_nV @ self._update.weight_VR
            if self._rows is not None:
                self._rows += grad_x_nV.t() @ self._update.inner_NR[part]

    def results(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight, bias and the update's two parts, or None if not requested.

        They have the dtypes of the inputs.
        """
        weight, bias, rows = self._weight, self._bias, self._rows
        return (
            self._hidden,
            None if weight is None else weight.to(self._head.weight_VD.dtype),
            None if bias is None or self._head.bias_V is None else bias.to(self._head.bias_V.dtype),
            self._inner,
            None if rows is None or self._update is None else rows.to(self._update.weight_VR.dtype),
        )


@dataclass(frozen=True)
class TopK:
    """Number and range of the logits that are kept of each token."""

    k: int
    """Number of largest logits that are kept."""
    vocab_size: int | None = None
    """Only ids below this number are considered, for output heads with more rows than tokens. If None, all ids."""
    temperature: float | None = None
    """If set, return log-probabilities at this temperature, over all ids that are considered, instead of logits."""


@torch.no_grad()
def topk_logits(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    top: TopK,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    group: Group = None,
    chunk_size: int | None = None,
    update: HeadUpdate | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token with their ids, largest first, without gradients.

    Args:
        hidden_ND: `[N, D]` hidden states.
        weight_VD: `[V, D]` output head, or this rank's rows of it.
        top: number of logits and range of ids.
        bias_V: `[V]` bias of these rows.
        transform: function that the model applies to the linear layer's output.
        group: the ranks that divide the head; None if this rank has the whole head.
        chunk_size: tokens per chunk of logits; if None, `default_chunk_size`.
        update: low-rank update of the head's product, for undivided heads only.

    Returns:
        `(logits_Nk, ids_Nk)`: float32 (float64 for float64 inputs) at temperature 1, and int64. The ids are those of
        the whole vocabulary, the same as without a group unless two logits of a token are equal.
    """
    head = OutputHead(weight_VD, bias_V, transform, group)
    chunk_size = chunk_size or default_chunk_size(on_gpu=hidden_ND.is_cuda)
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=wide)
    ids_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=torch.int64)
    for start in range(0, hidden_ND.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        x_nV = head.logits(hidden_ND[part], None if update is None else update.rows(part))
        logits_Nk[part], ids_Nk[part] = topk_of(x_nV, top) if group is None else _topk_of_all(x_nV, top, head)
    return logits_Nk, ids_Nk


def _normalized(logits_nk: Tensor, lse_n: Tensor, top: TopK) -> Tensor:
    """Return the kept logits, or their log-probabilities if a temperature is set.

    Args:
        lse_n: `logsumexp(x / temperature)` over all ids.
    """
    return logits_nk if top.temperature is None else logits_nk / top.temperature - lse_n[:, None]


def _lse(x_nV: Tensor, top: TopK) -> Tensor:
    """Return `logsumexp(x / temperature)`, or zeros if no temperature is set."""
    if top.temperature is None:
        return x_nV.new_zeros(x_nV.shape[0])
    return log_normalizer(x_nV / top.temperature)


def topk_of(logits_NV: Tensor, top: TopK) -> tuple[Tensor, Tensor]:
    """Compute `topk_logits` from given logits, in their dtype but at least in float32."""
    x_NV = widen(logits_NV[:, : top.vocab_size])
    logits_Nk, ids_Nk = x_NV.topk(top.k, dim=-1)
    return _normalized(logits_Nk, _lse(x_NV, top), top), ids_Nk


def _topk_of_all(x_nV: Tensor, top: TopK, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Return the k largest of all ranks' k largest logits. Ranks with fewer ids are padded with -inf."""
    assert head.group is not None
    num_here = x_nV.shape[1]
    num_ids = num_here * head.group.size()
    if top.vocab_size is not None:
        num_ids = min(num_ids, top.vocab_size)
        num_here = min(max(top.vocab_size - head.first_id, 0), num_here)
    assert top.k <= num_ids, f"the {top.k} largest of {num_ids} logits"
    kept = min(top.k, num_here)
    logits_nk, columns_nk = x_nV[:, :num_here].topk(kept, dim=-1)
    missing = (0, top.k - kept)
    of_all = [
        all_gather(candidates, 1, head.group, partial_gradient=False)
        for candidates in (F.pad(logits_nk, missing, value=-math.inf), F.pad(columns_nk + head.first_id, missing))
    ]
    best_nk, where_nk = of_all[0].topk(top.k, dim=-1)
    lse_n = _lse(x_nV[:, :num_here], top)  # -inf on a rank without ids
    if top.temperature is not None:
        lse_n = torch.logsumexp(all_gather(lse_n[:, None], 1, head.group, partial_gradient=False), dim=-1)
    return _normalized(best_nk, lse_n, top), of_all[1].gather(-1, where_nk)
