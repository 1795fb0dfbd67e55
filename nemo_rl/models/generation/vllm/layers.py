"""Look into the forward pass of a vLLM model, layer by layer; functions that run inside vLLM's worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from nemo_rl.models.huggingface.layers import recorded_outputs


def start_recording(worker: Any) -> None:
    """Keep what the decoder layers of this rank give out from now on."""
    model = worker.model_runner.get_model()
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        outputs = stack.enter_context(recorded_outputs(decoder_layers(model), residual_sum))
        worker.recording = stack.pop_all(), outputs


def stop_recording(worker: Any) -> list[Tensor]:
    """The hidden states behind each layer of this rank since `start_recording`, `[T, D]` float32 each."""
    stack, outputs = worker.recording
    stack.close()
    recorded: list[Tensor] = outputs
    return recorded


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
