"""Make torch tensors cheap to pickle, so that Ray moves them through shared memory without copies.

`batched_data_dict` packs itself with this when it leaves a process, and `worker_process` packs every result. Pickling a
torch tensor copies its bytes. Pickling a numpy view of the same memory passes the buffer itself to pickle protocol 5,
and Ray stores it out of band. Invariant: `pickle.loads(pickle.dumps(pack_tensors(x)))` equals `x` with every tensor on
the CPU, contiguous and detached.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# # Smaller received tensors are copied. The copy can be modified, and does not keep the possibly large shared-memory
# object alive.
COPY_BELOW_BYTES = 64 * 1024

# numpy lacks some of torch's dtypes. Tensors of these dtypes are sent as integers of the same width.
_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16}
_NATIVE_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


class PackedTensor:
    """A tensor prepared for pickle. Unpickling it makes a `torch.Tensor`.

    Args:
        tensor: any dense tensor; it is copied only if it is not contiguous or not on the CPU.
    """

    __slots__ = ("array", "dtype")

    def __init__(self, tensor: torch.Tensor) -> None:
        dense = tensor.detach().to("cpu").contiguous()
        self.dtype = dense.dtype
        if dense.dtype not in _NATIVE_DTYPES:
            dense = dense.view(_INTEGER_VIEW[dense.element_size()])
        self.array: np.ndarray = dense.numpy()

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[np.ndarray, torch.dtype]]:
        return _restore_tensor, (self.array, self.dtype)


class _WritableAlias:
    """Present read-only memory to numpy as writable, and keep its owner alive.

    `torch.from_numpy` warns about read-only arrays once in each process, and torch has no read-only tensors. Only the
    contract of `BatchedDataDict` forbids writing.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _restore_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    if array.nbytes < COPY_BELOW_BYTES:
        array = array.copy()
    elif not array.flags.writeable:
        array = np.asarray(_WritableAlias(array))
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def pack_tensors(value: Any) -> Any:
    """Replace each tensor inside nested lists, tuples and dicts by a `PackedTensor`.

    Containers are rebuilt. Other objects are returned unchanged, and so are sparse, quantized and distributed tensors,
    which torch pickles. A list of objects whose class has `pack_list` is replaced by the result of `pack_list`, because
    pickling thousands of objects takes longer than pickling their columns.

    Args:
        value: anything picklable.

    Returns:
        The same structure, ready to be pickled. Unpickling restores it, so there is no inverse function.
    """
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        dense = value.layout is torch.strided and not value.is_quantized and not value.is_meta
        return PackedTensor(value) if plain and dense else value
    kind = type(value)
    if kind is dict:
        return {key: pack_tensors(item) for key, item in value.items()}
    if kind is list:
        pack_list = getattr(type(value[0]), "pack_list", None) if value else None
        return pack_list(value) if pack_list else [pack_tensors(item) for item in value]
    if kind is tuple:
        return tuple(pack_tensors(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(pack_tensors(item) for item in value))
    return value
