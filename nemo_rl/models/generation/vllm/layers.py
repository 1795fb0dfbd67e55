"""Record the outputs of a vLLM model's layers; these functions run inside vLLM's worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.utils import PPMissingLayer

from nemo_rl.models.huggingface.layers import recorded_outputs


def start_recording(worker: Any) -> None:
    """Record the outputs of this rank's decoder layers from now on."""
    model = worker.model_runner.get_model()
    layers = [layer for layer in decoder_layers(model) if not isinstance(layer, PPMissingLayer)]
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        outputs = stack.enter_context(recorded_outputs(layers, residual_sum))
        worker.recording = stack.pop_all(), outputs, len(layers)


def stop_recording(worker: Any) -> list[Tensor]:
    """Return the hidden states after each layer of this rank since `start_recording`, `[T, D]` float32 each.

    The list is empty if a layer was not called: vLLM replays CUDA graphs of some architectures (DeepSeek V3.2, GLM-5)
    in pieces, in which no module runs.
    """
    stack, outputs, num_layers = worker.recording
    stack.close()
    recorded: list[Tensor] = outputs
    return recorded if len(recorded) >= num_layers else []


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
