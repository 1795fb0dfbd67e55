"""Watch which tensors a piece of code makes: the largest of them, and how much memory they hold together.

The watch sees tensors that operations return, in forward and in CPU backward passes, on fake devices too. It does not
see memory that an operation allocates and frees inside.
"""

import traceback
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Context that records the tensors made in it.

    Attributes:
        largest: elements of the largest tensor that was made; a view counts as its whole storage.
        where: the operation and the lines of code that made it.
        peak_bytes: largest number of bytes that tensors made in the context held together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.where = 0, ""
        self.peak_bytes = self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor, func)
        return out

    def _count(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes // tensor.itemsize > self.largest:
            self.largest = num_bytes // tensor.itemsize
            frames = [frame for frame in traceback.extract_stack() if "/nemo_rl/" in frame.filename]
            self.where = f"{func}: " + ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[-3:])
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(storage, self._free, storage._cdata, num_bytes)

    def _free(self, known: int, num_bytes: int) -> None:
        self._known.discard(known)
        self._bytes -= num_bytes
