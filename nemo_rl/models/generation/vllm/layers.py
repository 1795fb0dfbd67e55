"""Look into the forward pass of a vLLM model, layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def model_of(worker: Any) -> nn.Module:
    """The model of vLLM's worker, which runs in this process."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def residual_sum(output: Any) -> Tensor:
    """The hidden states behind a layer; vLLM's layers leave the last addition to the next one."""
    if not isinstance(output, tuple):
        hidden: Tensor = output
        return hidden
    hidden, residual = output[:2]
    return hidden if residual is None else hidden + residual


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run prompts through the modules themselves, not through a compiled copy, which calls no hooks."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", None) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
