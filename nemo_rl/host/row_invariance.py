"""Compute each row of a matrix product with the same bits, whatever rows are computed with it.

The kernels of CPUs choose the order of a sum by the number of rows: a product with one row is a product of a matrix and
a vector. An engine that decodes one token at a time would then compute other bits than a trainer that reads a whole
sequence. Threads divide rows, so the numbers of rows with other bits depend on the number of threads. A trial on this
processor finds them, for one and for many threads. `compute_rows_alike` replaces the matrix products of this process by
products with the next larger number of rows that has the usual bits, and with at least two columns. Missing rows and
columns are zeros. It also selects attention in blocks (`attention.blocks`), because the order of its sums would depend
on the length of a row.

Kernels of single elements compute vectors, and the elements after the last whole vector of a thread one by one. Some
functions then have other last bits (`_OF_ELEMENTS`). Their arguments are padded to whole vectors in each thread.

Invariant: after `compute_rows_alike`, a row of a product depends only on the same row of the left factor and on the
right factor. Tensor-parallel ranks divide the inner size of some products, and add their results. An engine with a
whole model then calls `linear_in_parts`, which computes and adds the same parts.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_TRIED_SIZES = ((32, 64), (64, 2), (64, 48), (48, 131), (576, 192), (1536, 576))
"""Inner and outer sizes of tried products."""
_FEW_ROWS = 32
"""Numbers of rows up to this one are all tried."""
_MANY_ROWS = (33, 41, 64, 100, 257)
"""Larger numbers of rows that are tried. All of them must have the usual bits."""
_OF_ELEMENTS = ("silu", "gelu", "sigmoid", "softplus", "rsqrt", "mish", "elu", "hardswish")
"""Functions of single elements whose kernels for vectors and for elements may differ in the last bits."""
_ELEMENTS = 64
"""Number of elements of the two vectors that a kernel computes at once: with AVX-512, vectors have 32 bfloat16."""
_SHARE_OF_THREAD = 32_768
"""Smallest number of elements for which torch uses another thread (`at::internal::GRAIN_SIZE`)."""
_LIBRARY: list[tuple[torch.library.Library, int]] = []
"""The replacements, which exist as long as this object, and the number of parts of sums."""


def rows_are_alike() -> bool:
    """Return whether `compute_rows_alike` was called in this process."""
    return bool(_LIBRARY)


def parts_of_sums() -> int:
    """Return the number of parts in which this process computes sums that tensor-parallel ranks of others divide."""
    return _LIBRARY[0][1] if _LIBRARY else 1


def compute_rows_alike(parts: int = 1) -> None:
    """Replace the matrix products of this process on CPUs, once. A process with one thread must keep that number.

    Args:
        parts: Number of tensor-parallel ranks of another process whose sums this one computes (`parts_of_sums`).

    Raises:
        ConfigError: The bits of a row of a product with many rows depend on the number of rows or threads.
    """
    if rows_are_alike():
        return
    enough = _enough_rows()
    library = torch.library.Library("aten", "IMPL")
    _LIBRARY.append((library, parts))
    for name, factor, axis in (("mm", 0, 0), ("addmm", 1, 0), ("bmm", 0, 1), ("baddbmm", 1, 1)):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        compute = _with_rows(kernel, enough, factor, axis)
        library.impl(name, compute, "CPU", with_keyset=True)
        library.impl(f"{name}.out", _into(compute), "CPU", with_keyset=True)
    for name in _OF_ELEMENTS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, _in_whole_vectors(kernel), "CPU", with_keyset=True)
    logger.info("Matrix products have at least %d rows, so that the bits of a row do not depend on others.", enough[1])


def linear_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer as tensor-parallel ranks do that divide its inputs, and add their outputs.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`, where `parts_of_sums` divides `in`.
        bias: `[out]`, which the first rank adds.

    Returns:
        `[..., out]`, of which each part and each sum is rounded.
    """
    parts = parts_of_sums()
    first, *others = (
        functional.linear(own_x.contiguous(), own_weight, None if number else bias)
        for number, (own_x, own_weight) in enumerate(zip(x.chunk(parts, -1), weight.chunk(parts, 1), strict=True))
    )
    return sum(others, first)


def _with_rows(kernel: Any, enough: Sequence[int], factor: int, axis: int) -> Callable[..., Tensor]:
    """Return a kernel that adds rows of zeros to the left factor, which is argument number `factor`.

    Args:
        enough: Number of rows to compute instead of a number of rows, for the first numbers.
    """

    def compute(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args[factor + 1].shape[axis + 1] == 1:
            return compute(keyset, *_with_two_columns(args, factor), **kwargs).narrow(axis + 1, 0, 1)
        rows = args[factor].shape[axis]
        wanted = enough[rows] if rows < len(enough) else rows
        if rows == wanted:
            whole: Tensor = kernel.call_boxed(keyset, *args, **kwargs)
            return whole
        extended = list(args)
        extended[factor] = _longer(args[factor], axis, wanted)
        if factor and args[0].dim() == args[1].dim() and args[0].shape[axis] == rows:  # it has a summand for each row
            extended[0] = _longer(args[0], axis, wanted)
        padded: Tensor = kernel.call_boxed(keyset, *extended, **kwargs)
        return padded.narrow(axis, 0, rows)

    return compute


def _with_two_columns(args: Sequence[Any], factor: int) -> list[Any]:
    """Return the arguments of a product with a second column of zeros in the right factor, argument `factor + 1`.

    A product with one column is one of a matrix and a vector, whose sums have an order for each number of rows.
    """
    wider = list(args)
    wider[factor + 1] = _longer(args[factor + 1].transpose(-1, -2), -2, 2).transpose(-1, -2)
    return wider


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


def _enough_rows() -> list[int]:
    """Return the smallest number of rows with the usual bits from each number on, by number from 0 to `_FEW_ROWS`."""
    others = _numbers_with_other_bits()
    if others and max(others) >= _FEW_ROWS:
        raise ConfigError(
            "policy.zero_mismatch=true needs matrix products whose rows do not depend on each other, and on this "
            f"processor a product of {max(others)} rows has other bits than one of {max(_MANY_ROWS)} rows with one "
            "thread. Set it to false."
        )
    enough = list(range(_FEW_ROWS + 1))
    for rows in reversed(range(1, _FEW_ROWS)):
        if rows in others:
            enough[rows] = enough[rows + 1]
    return enough


def _numbers_with_other_bits() -> set[int]:
    """Return the tried numbers of rows of which some number of threads computes other bits than one thread of many."""
    threads_before, others = torch.get_num_threads(), set[int]()
    try:
        for left, right in _products():
            torch.set_num_threads(1)
            usual = left @ right.T
            for threads in _numbers_of_threads(threads_before):
                torch.set_num_threads(threads)
                tried = (rows for rows in (*range(1, _FEW_ROWS + 1), *_MANY_ROWS) if rows not in others)
                others |= {rows for rows in tried if not torch.equal(left[:rows] @ right.T, usual[:rows])}
    finally:
        torch.set_num_threads(threads_before)
    return others


def _numbers_of_threads(now: int) -> Iterable[int]:
    """Return the numbers of threads that are tried: powers of 2 up to the number of cores, and the number `now`.

    A process with one thread tries no others: threads may block a process that was forked from one with threads.
    """
    cores = 1 if now == 1 else os.cpu_count() or 1
    return sorted({now, *(1 << power for power in range(cores.bit_length()))})


def _products() -> Iterable[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for inner, outer in _TRIED_SIZES:
            left = torch.randn(max(_MANY_ROWS), inner, generator=generator).to(dtype)
            yield left, torch.randn(outer, inner, generator=generator).to(dtype)
