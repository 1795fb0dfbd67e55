"""Compile chains of elementwise operations and reductions into one kernel, if a compiler for the device is available.

Invariant: a run never fails for lack of a compiler. On a CPU the function itself is called, so the bits do not change.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_uncompilable: set[Callable[..., Any]] = set()


def fused_on_gpu[**P, R](function: Callable[P, R], on: Tensor) -> Callable[P, R]:
    """Return a function's fastest form for a tensor's device: compiled on GPUs with triton, otherwise unchanged.

    Args:
        function: function of tensors, without side effects.
        on: any tensor that it gets.
    """
    if not on.is_cuda or not has_triton():
        return function
    compiled = _compiled(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        from torch._dynamo.exc import TorchDynamoException

        if function in _uncompilable:
            return function(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            _uncompilable.add(function)
            logger.warning("%s is not compiled for this GPU, so it is slower: %s", function.__name__, error)
            return function(*args, **kwargs)

    return call


@cache
def _compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)


@cache
def has_triton() -> bool:
    """Return whether torch can compile for the GPU of this process."""
    from torch.utils._triton import has_triton

    return has_triton()
