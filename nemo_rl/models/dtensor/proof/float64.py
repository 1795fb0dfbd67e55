"""Compute in float64 throughout, also where the code of an architecture asks for float32.

Norms, softmax, routers and rotary embeddings are written to compute in float32 whatever the model's format. Their
rounding, which differs with the order of a sum, would hide a small mistake behind 1e-5. In float64 it is 1e-12.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def in_float64() -> Iterator[None]:
    """Run a block so; for models in float64, in this thread."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wider(TorchFunctionMode):
    """Reads every float32 as float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
