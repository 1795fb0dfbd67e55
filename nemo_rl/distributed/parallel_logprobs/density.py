"""Describe the density from which a sampler draws: temperature, top-k and top-p filters, as in vLLM.

Invariant: a filter uses the whole vocabulary, so every rank of a divided head keeps the same tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.distributed.ranks.collectives import Group, all_gather, part_of
from nemo_rl.host.row_invariance import parts_of_sums, rows_are_alike
from nemo_rl.utils.errors import ConfigError


@dataclass(frozen=True)
class SamplingDensity:
    """Settings of the sampler that define the density from which it draws tokens."""

    temperature: float = 1.0
    """Divisor of the logits, above 0."""
    top_k: int | None = None
    """Number of largest logits that are kept. If None, all."""
    top_p: float = 1.0
    """Probability that the smallest kept set of tokens reaches. 1.0 keeps all tokens."""
    never: tuple[int, ...] = ()
    """Ids of tokens that the sampler never draws, such as placeholders of images."""

    def __post_init__(self) -> None:
        """Refuse values that do not define a density.

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
        """True if some tokens are excluded from the density."""
        return self.top_k is not None or self.top_p < 1.0

    def unfiltered(self) -> "SamplingDensity":
        """Return the density with the same temperature over all tokens, including those that are never drawn."""
        return SamplingDensity(self.temperature)


def apply_top_k_top_p(logits_NV: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Set the logits outside the sampler's top-k and top-p sets to -inf.

    Top-k keeps every logit that is not below the k-th largest, including ties. Top-p then sorts the kept tokens by
    ascending probability and drops the longest prefix whose sum is at most `1 - top_p`. The most probable token is
    always kept. vLLM's sampler uses the same order and tie rule.

    Args:
        logits_NV: `[N, V]` logits, already divided by the temperature.
        top_k: number of tokens to keep; if None, all.
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


def log_normalizer(x_NV: Tensor) -> Tensor:
    """Return `logsumexp(x)` `[N]`.

    If rows are alike (`row_invariance`), it comes from `log_softmax`, which sums each row in one thread. The sum in
    `logsumexp` is divided among threads if there are few rows. Parts of the vocabulary are joined as those of ranks are
    (`chunked`).
    """
    if not rows_are_alike():
        return torch.logsumexp(x_NV, dim=-1)
    parts = [_row_by_row(part) for part in x_NV.chunk(parts_of_sums(), dim=-1)]
    return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0)


def _row_by_row(x_NV: Tensor) -> Tensor:
    highest_N = x_NV.amax(dim=-1)
    # # A rank may hold filtered tokens only, of which all logits are -inf.
    return highest_N.where(highest_N.isneginf(), highest_N - x_NV.log_softmax(dim=-1).amax(dim=-1))


def whole_logprobs(logits_NV: Tensor) -> Tensor:
    """Return the log-probabilities `[N, V]` float32 of logits. If rows are alike, so are their normalizers."""
    x_NV = logits_NV.float()
    return x_NV - log_normalizer(x_NV)[:, None] if rows_are_alike() else x_NV.log_softmax(-1)


def logits_of_density(logits_nV: Tensor, targets_n: Tensor, density: SamplingDensity, group: Group) -> Tensor:
    """Divide logits by the temperature, and set logits outside the density to -inf except those of targets.

    With a divided head, the filters gather the logits of the whole vocabulary for these `n` tokens.

    Args:
        logits_nV: logits of this rank's part of the vocabulary.
        targets_n: `[n]` or `[n, k]` token ids.
        density: temperature and filters.
        group: the ranks that divide the vocabulary.
    """
    x_nV = logits_nV if density.temperature == 1.0 else logits_nV / density.temperature
    if density.never:
        x_nV = _without(x_nV, targets_n, density.never, group)
    if not density.filters:
        return x_nV
    whole_nV = all_gather(x_nV, 1, group, partial_gradient=False)
    filtered_nV, keep_nV = apply_top_k_top_p(whole_nV, density.top_k, density.top_p)
    if keep_nV is None:
        return x_nV
    ids_nk = columns(targets_n)
    filtered_nV = filtered_nV.scatter(-1, ids_nk, whole_nV.gather(-1, ids_nk))
    return filtered_nV if group is None else part_of(filtered_nV, 1, group).contiguous()


def _without(x_nV: Tensor, targets_n: Tensor, never: tuple[int, ...], group: Group) -> Tensor:
    """Return a copy of logits with -inf for tokens that are never drawn, unless they are targets."""
    x_nV = x_nV.clone()
    first_id = 0 if group is None else group.rank() * x_nV.shape[1]
    for token in never:
        column = token - first_id
        if 0 <= column < x_nV.shape[1]:
            is_target_n = (columns(targets_n) == token).any(dim=1)
            x_nV[:, column] = x_nV[:, column].where(is_target_n, -math.inf)
    return x_nV


def columns(targets_n: Tensor) -> Tensor:
    """View targets `[n]` or `[n, k]` as `[n, k]`."""
    return targets_n if targets_n.ndim == 2 else targets_n[:, None]
