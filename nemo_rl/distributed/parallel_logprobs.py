"""Token log-probabilities and entropies from hidden states, without the `[N, V]` logits in memory.

The output head is applied to a few hundred tokens at a time and once more in the backward pass, so
peak memory grows with `chunk_size x V`, never with `N x V`. Legend: `N` tokens, `D` hidden size,
`V` vocabulary, `k` vocabulary entries that are asked for at a token (distillation).

Invariant: every reduction over the vocabulary runs in float32 or wider, whatever the weights are.

The mathematics is split in three steps (`_chunk_logits`, `_filtered`, `_statistics`) so that a
vocabulary-parallel version replaces only the reductions in `_statistics`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.fusion import fused_on_gpu

_CHUNK_SIZE, _CHUNK_SIZE_GPU = 512, 2048


def default_chunk_size(hidden_ND: Tensor) -> int:
    """Tokens per chunk of logits: 512 on CPUs, 2048 on GPUs.

    With 152 thousand tokens of vocabulary 2048 rows of logits are 1.2 GB in float32; a GPU's memory is written a
    quarter as often for the head's gradient as with 512, and holds three or four such tensors at the peak.
    """
    return _CHUNK_SIZE_GPU if hidden_ND.is_cuda else _CHUNK_SIZE


@dataclass(frozen=True)
class SamplingDensity:
    """How the sampler turned logits into the density it drew tokens from.

    Attributes:
        temperature: logits are divided by it; > 0.
        top_k: only the k largest logits stay; None keeps all.
        top_p: the smallest set of tokens whose probability reaches top_p stays; 1.0 keeps all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that define no density.

        Raises:
            ConfigError: temperature <= 0 (greedy decoding has no density), top_k < 1, top_p not in (0, 1].
        """
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature={self.temperature}: log-probabilities need a temperature above 0 "
                "(greedy decoding has no density). Set policy.generation.temperature > 0."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: use a positive count, or null to keep all tokens.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: use a value in (0, 1]; 1.0 keeps all tokens.")

    @property
    def filters(self) -> bool:
        """Whether some tokens are cut out of the density."""
        return self.top_k is not None or self.top_p < 1.0

    def unfiltered(self) -> "SamplingDensity":
        """The same temperature over all tokens."""
        return SamplingDensity(self.temperature)


@dataclass(frozen=True)
class TopK:
    """Which logits to keep of each token.

    Attributes:
        k: how many, the largest ones.
        vocab_size: only ids below it compete, for output heads with rows beyond the vocabulary; None: all ids.
    """

    k: int
    vocab_size: int | None = None


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    density: SamplingDensity | None = None,
    bias_V: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, or of several, and entropy of each token's distribution.

    With `x = (h W^T + b) / temperature`, restricted to the tokens the sampler kept:
    `logprob = x[target] - logsumexp(x)` and `entropy = -sum_v p_v log p_v`. Both are differentiable
    in `hidden_ND`, `weight_VD` and `bias_V`; logits are recomputed chunk by chunk in the backward pass.

    A target that the filter would cut is kept in the density: the sampler did draw it, so only
    rounding between the sampler's and the trainer's logits can push it out, and its log-probability
    stays finite.

    Args:
        hidden_ND: `[N, D]` hidden states that predict the targets.
        weight_VD: `[V, D]` output head.
        targets_N: `[N]` int64 token ids, or `[N, k]` with k ids at each token.
        density: temperature and filters; None means the plain softmax.
        bias_V: `[V]` bias of the head.
        chunk_size: tokens per chunk of logits; None takes `default_chunk_size`.

    Returns:
        `(logprobs, entropy_N)`, float32 (float64 for float64 inputs); `logprobs` has the shape of the targets.
    """
    density = density or SamplingDensity()
    chunk_size = chunk_size or default_chunk_size(hidden_ND)
    return _ChunkedTokenLogprobs.apply(hidden_ND, weight_VD, bias_V, targets_N, density, chunk_size)


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, *, density: SamplingDensity | None = None
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` for logits that exist already (heads that are not a plain linear layer).

    Args:
        logits_NV: `[N, V]` unscaled logits.
        targets_N: `[N]` int64 token ids, or `[N, k]`.
        density: temperature and filters; None means the plain softmax.

    Returns:
        As `token_logprobs`.
    """
    density = density or SamplingDensity()
    x_NV = _widen(logits_NV) / density.temperature
    x_NV = _filtered(x_NV, targets_N, density)
    return _statistics(x_NV, targets_N)


@torch.no_grad()
def topk_logits(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    top: TopK,
    *,
    bias_V: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token and their ids, largest first; not differentiable.

    Args:
        hidden_ND: `[N, D]` hidden states.
        weight_VD: `[V, D]` output head.
        top: how many logits, of which ids.
        bias_V: `[V]` bias of the head.
        chunk_size: tokens per chunk of logits; None takes `default_chunk_size`.

    Returns:
        `(logits_Nk, ids_Nk)`: float32 (float64 for float64 inputs) at temperature 1, and int64.
    """
    chunk_size = chunk_size or default_chunk_size(hidden_ND)
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=wide)
    ids_Nk = hidden_ND.new_empty((hidden_ND.shape[0], top.k), dtype=torch.int64)
    for start in range(0, hidden_ND.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        x_nV = _chunk_logits(hidden_ND[part], weight_VD, bias_V, temperature=1.0)
        logits_Nk[part], ids_Nk[part] = topk_of(x_nV, top)
    return logits_Nk, ids_Nk


def topk_of(logits_NV: Tensor, top: TopK) -> tuple[Tensor, Tensor]:
    """`topk_logits` for logits that exist already; in their dtype, float32 at least."""
    logits_Nk, ids_Nk = _widen(logits_NV[:, : top.vocab_size]).topk(top.k, dim=-1)
    return logits_Nk, ids_Nk


def apply_top_k_top_p(logits_NV: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Set the logits outside the sampler's top-k and nucleus sets to -inf.

    Top-k keeps every logit that is not below the k-th largest (ties stay). Top-p then sorts what is
    left by ascending probability and drops the longest prefix whose sum is at most `1 - top_p`; the
    most probable token always stays. This is the order and the tie rule of vLLM's sampler.

    Args:
        logits_NV: `[N, V]` logits, already divided by the temperature.
        top_k: number of tokens to keep; None keeps all.
        top_p: probability mass to keep; 1.0 keeps all.

    Returns:
        The filtered logits and the `[N, V]` bool mask of kept tokens (None if nothing is filtered).
    """
    vocab_size = logits_NV.shape[-1]
    keep_NV: Tensor | None = None
    if top_k is not None and top_k < vocab_size:
        kth_N1 = logits_NV.topk(top_k, dim=-1).values[..., -1:]
        keep_NV = logits_NV >= kth_N1
        logits_NV = logits_NV.masked_fill(~keep_NV, -math.inf)
    if top_p < 1.0:
        sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=False)
        mass_NV = sorted_NV.softmax(dim=-1).cumsum(dim=-1)
        drop_sorted_NV = mass_NV <= 1.0 - top_p
        drop_sorted_NV[..., -1] = False
        drop_NV = torch.zeros_like(drop_sorted_NV).scatter(-1, order_NV, drop_sorted_NV)
        keep_NV = ~drop_NV if keep_NV is None else keep_NV & ~drop_NV
        logits_NV = logits_NV.masked_fill(drop_NV, -math.inf)
    return logits_NV, keep_NV


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _chunk_logits(h_nD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """`[n, V]` logits in float32 or wider, divided by the temperature."""
    if h_nD.is_cuda and h_nD.dtype in (torch.bfloat16, torch.float16):
        x_nV = torch.mm(h_nD, weight_VD.t(), out_dtype=torch.float32)
    else:
        x_nV = _widen(h_nD @ weight_VD.t())
    if bias_V is not None:
        x_nV = x_nV + bias_V.to(x_nV.dtype)
    return x_nV if temperature == 1.0 else x_nV / temperature


def _filtered(x_nV: Tensor, targets_n: Tensor, density: SamplingDensity) -> Tensor:
    """Logits with the tokens outside the density at -inf; the target always stays."""
    if not density.filters:
        return x_nV
    filtered_nV, keep_nV = apply_top_k_top_p(x_nV, density.top_k, density.top_p)
    if keep_nV is None:
        return x_nV
    columns_nk = _columns(targets_n)
    return filtered_nV.scatter(-1, columns_nk, x_nV.gather(-1, columns_nk))


def _columns(targets_n: Tensor) -> Tensor:
    """Targets `[n]` or `[n, k]` as `[n, k]`."""
    return targets_n if targets_n.ndim == 2 else targets_n[:, None]


def _statistics(x_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy."""
    lse_n, p_nV = _probabilities(x_nV)
    logprob_n = (x_nV.gather(-1, _columns(targets_n)) - lse_n[:, None]).view(targets_n.shape)
    return logprob_n, _entropy(x_nV, lse_n, p_nV)


def _probabilities(x_nV: Tensor) -> tuple[Tensor, Tensor]:
    """`logsumexp(x)` `[n]` and `softmax(x)` `[n, V]`."""
    lse_n = torch.logsumexp(x_nV, dim=-1)
    return lse_n, (x_nV - lse_n[:, None]).exp()


def _entropy(x_nV: Tensor, lse_n: Tensor, p_nV: Tensor) -> Tensor:
    # A filtered token has p = 0 and x = -inf; its term p*x is 0 in the limit.
    return lse_n - torch.where(p_nV > 0, p_nV * x_nV, 0.0).sum(dim=-1)


class _ChunkedTokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`; saves hidden states and weights only, and recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        density: SamplingDensity,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = hidden_ND.new_zeros(targets_N.shape, dtype=wide)
        entropy_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=wide)
        statistics = fused_on_gpu(_statistics, hidden_ND)
        for start in range(0, hidden_ND.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            x_nV = _chunk_logits(hidden_ND[part], weight_VD, bias_V, density.temperature)
            x_nV = _filtered(x_nV, targets_N[part], density)
            logprobs_N[part], entropy_N[part] = statistics(x_nV, targets_N[part])
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
        ctx.density, ctx.chunk_size = density, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(targets_N, dtype=wide)
        if grad_entropy_N is not None and not grad_entropy_N.is_cuda and not grad_entropy_N.any():
            grad_entropy_N = None  # on a GPU the question would wait for the device, and costs more than the answer
        grad_hidden = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if bias_V is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias_V, dtype=wide)
        grad_logits = fused_on_gpu(_grad_logits, hidden_ND)
        for start in range(0, hidden_ND.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            h_nD, targets_n = hidden_ND[part], targets_N[part]
            x_nV = _chunk_logits(h_nD, weight_VD, bias_V, ctx.density.temperature)
            x_nV = _filtered(x_nV, targets_n, ctx.density)
            grad_logprob_nk = _columns(grad_logprobs_N[part])
            grad_x_nV = grad_logits(x_nV, grad_logprob_nk, None if grad_entropy_N is None else grad_entropy_N[part])
            grad_x_nV = grad_x_nV.scatter_add_(-1, _columns(targets_n), grad_logprob_nk)
            if ctx.density.temperature != 1.0:
                grad_x_nV = grad_x_nV.div_(ctx.density.temperature)
            if grad_bias is not None:
                grad_bias += grad_x_nV.sum(dim=0)
            grad_x_nV = grad_x_nV.to(h_nD.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_x_nV @ weight_VD
            if grad_weight is not None:
                grad_weight += grad_x_nV.t() @ h_nD
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _grad_logits(x_nV: Tensor, grad_logprob_nk: Tensor, grad_entropy_n: Tensor | None) -> Tensor:
    """Gradient of `g_l * logprob + g_h * entropy` in x, without the targets' own terms.

    That is `-g_l p - g_h p (log p + H)`, summed over targets; `g_l` is still to be added at each target.
    """
    lse_n, p_nV = _probabilities(x_nV)
    grad_x_nV = p_nV * -grad_logprob_nk.sum(dim=-1, keepdim=True)
    if grad_entropy_n is not None:
        log_p_nV = torch.where(p_nV > 0, x_nV - lse_n[:, None], 0.0)
        grad_x_nV -= grad_entropy_n[:, None] * p_nV * (log_p_nV + _entropy(x_nV, lse_n, p_nV)[:, None])
    return grad_x_nV
