"""Put new weights into a running vLLM model; functions that run inside vLLM's worker.

On CPUs vLLM repacks every linear layer after loading and throws the plain weight away, so an update has to
restore the plain layout, load, and repack; a tied output head keeps its own packed copy that this does not
reach, so it is repacked once more. On GPUs weights are loaded in place.
Law: after `finish_reload` the model answers with the tensors that were loaded.
"""

from typing import Any

import torch

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform


def begin_reload(worker: Any) -> None:
    """Bring the model into a state that accepts tensors under Hugging Face names."""
    if current_platform.is_cpu():
        initialize_layerwise_reload(worker.model_runner.get_model())


def load_tensors(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
    """Load some tensors; returns the names of the engine parameters they went to."""
    with torch.no_grad():
        return set(worker.model_runner.get_model().load_weights(iter(tensors)))


def finish_reload(worker: Any) -> set[str]:
    """Put the loaded tensors in force; returns the names of all engine parameters that need a tensor.

    A tied output head shares the embedding's storage and gets no tensor of its own.
    """
    model = worker.model_runner.get_model()
    expected = {name for name, _ in model.named_parameters()}
    if getattr(worker.model_runner.model_config.hf_text_config, "tie_word_embeddings", False):
        expected -= {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    if current_platform.is_cpu():
        with torch.no_grad():
            finalize_layerwise_reload(model, worker.model_runner.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
    return expected
