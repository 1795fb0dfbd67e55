"""Compute everything in float64, even if the code of an architecture casts to float32.

Norms, softmax, routers and rotary embeddings compute in float32 for any dtype of the model. Their rounding depends on
the order of sums and would hide errors below 1e-5. In float64 the rounding is 1e-12.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def in_float64() -> Iterator[None]:
    """Run a block in which this thread computes in float64; for models in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wider(TorchFunctionMode):
    """Replaces float32 by float64 in every torch call."""

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
