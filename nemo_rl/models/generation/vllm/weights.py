"""Put new weights into a running vLLM model; functions that run inside vLLM's worker.

On CPUs vLLM repacks every linear layer after loading and throws the plain weight away, so an update has to
restore the plain layout, load, and repack; a tied output head keeps its own packed copy that this does not
reach, so it is repacked once more. On GPUs weights are loaded in place.
Law: after `finish_reload` the model answers with the tensors that were loaded.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def begin_reload(worker: Any) -> None:
    """Bring the model into a state that accepts tensors under Hugging Face names.

    An update that was broken off is closed first, so that no layer counts its tensors for the new one.
    """
    if current_platform.is_cpu():
        model = worker.model_runner.get_model()
        if any(get_layerwise_info(module).can_load() for module in model.modules()):
            finalize_layerwise_reload(model, worker.model_runner.model_config)
        initialize_layerwise_reload(model)


def load_tensors(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
    """Load some tensors; returns the names of the engine parameters they went to."""
    with torch.no_grad():
        return set(worker.model_runner.get_model().load_weights(iter(tensors)))


def finish_reload(worker: Any, bound: set[str]) -> set[str]:
    """Put the loaded tensors in force.

    Args:
        worker: vLLM's worker.
        bound: names of the engine parameters that tensors went to.

    Returns:
        Names of engine parameters that got nothing, and on CPUs of linear layers that got only a part. A
        tied output head shares the embedding's storage and needs no tensor of its own.
    """
    model = worker.model_runner.get_model()
    expected = {name for name, _ in model.named_parameters()}
    if getattr(worker.model_runner.model_config.hf_text_config, "tie_word_embeddings", False):
        expected -= {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    unbound = expected - bound
    if current_platform.is_cpu():
        unbound |= incomplete_layers(model)
        with torch.no_grad():
            finalize_layerwise_reload(model, worker.model_runner.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
    return unbound


def incomplete_layers(model: torch.nn.Module) -> set[str]:
    """Fused linear layers (query, key and value in one) that lack some of their tensors.

    vLLM would fill the rest with whatever is in memory.
    """
    names = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        num_needed = info.load_numel_total or 0
        if isinstance(module, LinearBase) and 0 < info.load_numel < num_needed:
            names.add(f"part of {name}")
    return names
