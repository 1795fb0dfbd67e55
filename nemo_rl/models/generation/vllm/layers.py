"""Record the outputs of a vLLM model's layers; these functions run inside vLLM's worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from nemo_rl.models.huggingface.layers import recorded_outputs


def start_recording(worker: Any) -> None:
    """Record the outputs of this rank's decoder layers from now on."""
    model = worker.model_runner.get_model()
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        outputs = stack.enter_context(recorded_outputs(decoder_layers(model), residual_sum))
        worker.recording = stack.pop_all(), outputs


def stop_recording(worker: Any) -> list[Tensor]:
    """Return the hidden states after each layer of this rank since `start_recording`, `[T, D]` float32 each."""
    stack, outputs = worker.recording
    stack.close()
    recorded: list[Tensor] = outputs
    return recorded


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def residual_sum(output: Any) -> Tensor:
    """Return the hidden states after a layer; vLLM's layers leave the last addition to the next layer."""
    if not isinstance(output, tuple):
        hidden: Tensor = output
        return hidden
    hidden, residual = output[:2]
    return hidden if residual is None else hidden + residual


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run prompts through the modules themselves, because a compiled copy calls no hooks."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", None) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
