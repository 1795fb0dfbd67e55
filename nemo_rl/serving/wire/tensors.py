"""Convert between the tensors of messages and NumPy arrays.

Invariant: an array has the shape that its tensor announces, or the request is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.wire.messages import DTYPES

MOST_CELLS = 2**28
"""Largest number of cells of a tensor. A sparse tensor may announce more cells than its body has bytes."""
_NUMPY: dict[int, np.dtype[Any]] = {
    DTYPES["float32"]: np.dtype("<f4"),
    DTYPES["int64"]: np.dtype("<i8"),
    DTYPES["int32"]: np.dtype("<i4"),
    DTYPES["bfloat16"]: np.dtype("<u2"),
}


def values_of(raw: bytes, dtype: int, what: str) -> NDArray[Any]:
    """Return the numbers in the bytes of a tensor. bfloat16 becomes float32.

    Args:
        what: name of the tensor, for the error.

    Raises:
        RequestError: the type is unknown, or the bytes are no whole number of values.
    """
    kind = _NUMPY.get(dtype)
    if kind is None:
        raise RequestError(f"{what} has the type number {dtype}; allowed are float32, int64, int32 and bfloat16.")
    if len(raw) % kind.itemsize:
        raise RequestError(f"{what} has {len(raw)} bytes, which is no multiple of {kind.itemsize}.")
    values: NDArray[Any] = np.frombuffer(raw, kind)
    if dtype == DTYPES["bfloat16"]:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values


def read_tensor(message: Any, what: str, fill: int = 0) -> NDArray[Any]:
    """Return a tensor of a message as an array.

    Args:
        message: message `Tensor`.
        what: name of the tensor, for the error.
        fill: value of the cells that a sparse tensor does not list.

    Raises:
        RequestError: the tensor contradicts itself.
    """
    shape = tuple(message.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_CELLS:
        raise RequestError(
            f"{what} has the shape {list(shape)}; sizes must be 0 or more, and at most {MOST_CELLS} cells."
        )
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = values_of(csr.values, message.dtype, what)
        indices = [values_of(raw, DTYPES["int64"], what) for raw in (csr.crow_indices, csr.col_indices)]
        return dense_of(values, indices[0], indices[1], shape, fill)
    values = values_of(message.dense, message.dtype, what)
    return shaped(values, shape or (values.size,), what)


def shaped(values: NDArray[Any], shape: Sequence[int], what: str) -> NDArray[Any]:
    """Return values with a shape, or raise a `RequestError` if their number is another one."""
    if values.size != math.prod(shape):
        raise RequestError(f"{what} has {values.size} values, but its shape {list(shape)} has {math.prod(shape)}.")
    return values.reshape(tuple(shape))


def dense_of(
    values: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any], shape: Sequence[int], fill: int
) -> NDArray[Any]:
    """Return a sparse matrix (CSR) as a dense one.

    Args:
        values: `[n]` listed values.
        rows: `[R + 1]` index of the first value of each row, and `n` at the end.
        columns: `[n]` column of each value.
        shape: `R` and the number of columns.
        fill: value of the other cells.

    Raises:
        RequestError: the indices contradict the shape.
    """
    if len(shape) != 2:
        raise RequestError(f"A sparse tensor has the shape {list(shape)}; it must have two dimensions.")
    is_whole = rows.size == shape[0] + 1 and values.size == columns.size and math.prod(shape) <= MOST_CELLS
    if not is_whole or rows[0] != 0 or rows[-1] != values.size or (np.diff(rows) < 0).any():
        raise RequestError(f"The row indices of a sparse tensor do not fit its shape {list(shape)}.")
    if columns.size and (columns.min() < 0 or columns.max() >= shape[1]):
        raise RequestError(f"A column index of a sparse tensor is outside 0..{shape[1] - 1}.")
    dense = np.full(tuple(shape), fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def write_batch(message: Any, arrays: Sequence[NDArray[np.float32]]) -> None:
    """Write arrays of float32, which have equal trailing sizes, to a message `BatchedTensor`."""
    flat = [np.ascontiguousarray(array, np.float32) for array in arrays]
    message.data = b"".join(array.tobytes() for array in flat)
    message.offsets = np.cumsum([0, *(array.nbytes for array in flat)], dtype=np.int64).tobytes()
    message.dtype = DTYPES["float32"]
    message.trailing_shape.extend(flat[0].shape[1:])
