"""Compute each row of a matrix product with the same bits, whatever rows are computed with it.

The kernels of CPUs choose the order of a sum by the number of rows: a product with one row is a product of a matrix and
a vector. An engine that decodes one token at a time would then compute other bits than a trainer that reads a whole
sequence. `compute_rows_alike` replaces the matrix products of this process by products with at least as many rows as a
test on this processor shows to be needed. Missing rows are zeros. It also selects attention in blocks
(`attention.blocks`), because the order of its sums would depend on the length of a row.

Kernels of single elements compute vectors, and the elements after the last whole vector of a thread one by one. Some
functions then have other last bits (`_OF_ELEMENTS`). Their arguments are padded to whole vectors in each thread.

Invariant: after `compute_rows_alike`, a row of a product depends only on the same row of the left factor and on the
right factor. The inner size is not divided, so tensor-parallel ranks that divide it compute other bits than one rank.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_TRIED_ROWS = (1, 2, 4, 8, 16, 32)
_TRIED_SIZES = ((64, 48), (576, 192), (576, 1536), (1536, 576), (48, 131))
"""Inner and outer sizes of tried products."""
_TRIED_LENGTHS = (9, 33, 64, 100, 257)
"""Numbers of rows of tried products."""
_OF_ELEMENTS = ("silu", "gelu", "sigmoid", "softplus", "rsqrt", "mish", "elu", "hardswish")
"""Functions of single elements whose kernels for vectors and for elements may differ in the last bits."""
_ELEMENTS = 64
"""Number of elements of the two vectors that a kernel computes at once: with AVX-512, vectors have 32 bfloat16."""
_SHARE_OF_THREAD = 32_768
"""Smallest number of elements for which torch uses another thread (`at::internal::GRAIN_SIZE`)."""
_LIBRARY: list[torch.library.Library] = []
"""The replacements, which exist as long as this object."""


def rows_are_alike() -> bool:
    """Return whether `compute_rows_alike` was called in this process."""
    return bool(_LIBRARY)


def compute_rows_alike() -> None:
    """Replace the matrix products of this process on CPUs, once.

    Raises:
        ConfigError: The rows of a product with many rows still depend on each other on this processor.
    """
    if rows_are_alike():
        return
    rows = _rows_needed()
    library = torch.library.Library("aten", "IMPL")
    _LIBRARY.append(library)
    for name, factor, axis in (("mm", 0, 0), ("addmm", 1, 0), ("bmm", 0, 1), ("baddbmm", 1, 1)):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        compute = _with_rows(kernel, rows, factor, axis)
        library.impl(name, compute, "CPU", with_keyset=True)
        library.impl(f"{name}.out", _into(compute), "CPU", with_keyset=True)
    for name in _OF_ELEMENTS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, _in_whole_vectors(kernel), "CPU", with_keyset=True)
    logger.info("Matrix products have at least %d rows, so that the bits of a row do not depend on others.", rows)


def _with_rows(kernel: Any, least: int, factor: int, axis: int) -> Callable[..., Tensor]:
    """Return a kernel that adds rows of zeros to the left factor, which is argument number `factor`."""

    def compute(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        rows = args[factor].shape[axis]
        if rows >= least or rows == 0:
            whole: Tensor = kernel.call_boxed(keyset, *args, **kwargs)
            return whole
        extended = list(args)
        extended[factor] = _longer(args[factor], axis, least)
        if factor and args[0].dim() == args[1].dim() and args[0].shape[axis] == rows:  # it has a summand for each row
            extended[0] = _longer(args[0], axis, least)
        padded: Tensor = kernel.call_boxed(keyset, *extended, **kwargs)
        return padded.narrow(axis, 0, rows)

    return compute


def _into(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that writes the result of another one into its argument `out`."""

    def into(keyset: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return out.copy_(compute(keyset, *args, **kwargs))

    return into


def _in_whole_vectors(kernel: Any) -> Callable[..., Tensor]:
    """Return a kernel of single elements that adds elements until each thread has whole vectors."""

    def compute(keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count = x.numel()
        size = _whole_vectors(count)
        if size == count and x.is_contiguous():
            whole: Tensor = kernel.call_boxed(keyset, x, *args, **kwargs)
            return whole
        flat = x.new_ones(size)
        flat[:count] = x.reshape(-1)
        padded: Tensor = kernel.call_boxed(keyset, flat, *args, **kwargs)
        return padded[:count].view(x.shape)

    return compute


def _whole_vectors(count: int) -> int:
    """Return the smallest number of elements from `count` on that gives each thread whole vectors."""
    while True:
        threads = min(torch.get_num_threads(), -(-count // _SHARE_OF_THREAD)) or 1
        missing = -count % (_ELEMENTS * threads)
        if not missing:
            return count
        count += missing


def _longer(x: Tensor, axis: int, rows: int) -> Tensor:
    size = list(x.shape)
    size[axis] = rows
    longer = x.new_zeros(size)
    longer.narrow(axis, 0, x.shape[axis]).copy_(x)
    return longer


def _rows_needed() -> int:
    """Return the smallest number of rows from which on the bits of a row do not depend on the number of rows."""
    for rows in _TRIED_ROWS:
        if all(_are_alike(rows, *each) for each in _products()):
            return rows
    raise ConfigError(
        "policy.zero_mismatch=true needs matrix products whose rows do not depend on each other, and on this processor "
        f"the bits of a row still change with the number of rows above {_TRIED_ROWS[-1]}. Set it to false."
    )


def _products() -> Iterable[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for inner, outer in _TRIED_SIZES:
            left = torch.randn(max(_TRIED_LENGTHS), inner, generator=generator).to(dtype)
            yield left, torch.randn(outer, inner, generator=generator).to(dtype)


def _are_alike(rows: int, left: Tensor, right: Tensor) -> bool:
    """Return whether products of `rows` rows and of more rows have the same bits."""
    few = torch.cat([left[start : start + rows] @ right.T for start in range(0, 2 * rows, rows)])
    return all(
        torch.equal((left[:length] @ right.T)[: min(length, 2 * rows)], few[:length])
        for length in (*_TRIED_LENGTHS, rows + 1)
        if length >= rows
    )
