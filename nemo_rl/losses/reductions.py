"""Compute sums, means and variances under a mask.

Invariants: an entry whose mask is 0 affects neither value nor gradient, even if it is NaN or infinite. The result of an
empty mask is 0.
"""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of `values * mask`, ignoring entries whose mask is 0.

    Args:
        values: Any shape.
        mask: Weights broadcastable to `values`; usually 0 or 1.
        dim: Dimension to sum over. If None, all dimensions.
    """
    weighted = torch.where(mask != 0, values, 0.0) * mask
    return weighted.sum() if dim is None else weighted.sum(dim)


def safe_divide(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Return `numerator / denominator`, or 0 where the denominator is 0."""
    divisor = torch.as_tensor(denominator, device=numerator.device, dtype=numerator.dtype)
    is_zero = divisor == 0
    return torch.where(is_zero, 0.0, numerator / torch.where(is_zero, 1.0, divisor))


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | None = None,
    global_normalization_factor: Tensor | float | None = None,
) -> Tensor:
    """Return the masked sum divided by the sum of the mask or by a given global factor.

    Args:
        values: Any shape.
        mask: Weights broadcastable to `values`; usually 0 or 1.
        dim: Dimension to reduce. If None, all dimensions.
        global_normalization_factor: Denominator counted over the global batch. If it is given, results of disjoint
            parts of a batch add up to the result of the whole batch.

    Returns:
        Reduced tensor; 0 where the denominator is 0.
    """
    total = masked_sum(values, mask, dim)
    if global_normalization_factor is not None:
        return safe_divide(total, global_normalization_factor)
    counts = mask.expand_as(values).to(values.dtype)
    return safe_divide(total, counts.sum() if dim is None else counts.sum(dim))


def masked_var(values: Tensor, mask: Tensor, mean: Tensor | float | None = None, unbiased: bool = True) -> Tensor:
    """Return the variance of the entries that the mask keeps.

    Args:
        values: Any shape.
        mask: 0/1 weights broadcastable to `values`.
        mean: Mean from which deviations are measured. If None, the masked mean.
        unbiased: Divide by `n - 1` (Bessel) instead of `n`.

    Returns:
        Scalar, 0 if fewer than two entries (or fewer than one, if biased) are kept.
    """
    center = masked_mean(values, mask) if mean is None else mean
    total = masked_sum((values - center) ** 2, mask)
    count = mask.expand_as(values).to(values.dtype).sum()
    return safe_divide(total, (count - 1).clamp(min=0) if unbiased else count)


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    """Return the smallest kept entry, or `+inf` if none is kept, so that a minimum over parts is correct."""
    return torch.where(mask != 0, values, torch.inf).min()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest kept entry, or `-inf` if none is kept, so that a maximum over parts is correct."""
    return torch.where(mask != 0, values, -torch.inf).max()
