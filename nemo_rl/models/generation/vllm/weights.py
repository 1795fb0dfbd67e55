"""Put new weights into a running vLLM model; functions that run inside vLLM's worker.

vLLM rearranges weights once they are loaded: packed matrix products and experts, absorbed attention projections. An
update goes through vLLM's own layerwise reload on every platform: layers take the layout of a checkpoint, and each is
rearranged anew when its last tensor has come, into the storage it had (so CUDA graphs stay valid). Two packings on CPUs
are out of its reach and are made here: experts are packed only with a new kernel, and a tied output head has a packed
copy of its own. Invariant: after `finish_reload` the model answers with the tensors that were loaded.
"""

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def begin_reload(worker: Any) -> None:
    """Bring the model into a state that accepts tensors of a checkpoint.

    An update that was broken off is closed first, so that no layer counts its tensors for the new one.
    """
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if any(get_layerwise_info(module).can_load() for module in model.modules()):
            finalize_layerwise_reload(model, worker.model_runner.model_config)
        initialize_layerwise_reload(model)
    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
    worker.unbound = {name for name, _ in model.named_parameters()}


def load_tensors(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load some tensors, of which a rank takes its part."""
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        worker.unbound -= set(worker.model_runner.get_model().load_weights(iter(tensors)))


def finish_reload(worker: Any) -> list[str]:
    """Put the loaded tensors in force.

    Returns:
        Names of the engine parameters that no tensor went to and that need one of their own, and of the layers that
        got only a part of theirs. A tied output head shares the embedding's storage and needs none.
    """
    model, unbound = worker.model_runner.get_model(), worker.unbound
    heads = {name: m for name, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    if getattr(worker.model_runner.model_config.hf_text_config, "tie_word_embeddings", False):
        unbound = unbound - {f"{name}.weight" for name in heads}
    unbound = unbound | incomplete_layers(model)
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if current_platform.is_cpu():
            for head in heads.values():
                head.quant_method.process_weights_after_loading(head)
    return sorted(unbound)


def incomplete_layers(model: torch.nn.Module) -> set[str]:
    """Layers of several tensors (query, key and value in one; experts) that lack some of them.

    vLLM would fill the rest with whatever is in memory. Embeddings are one tensor, padded to a larger one.
    """
    names = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        num_needed = info.load_numel_total or 0
        if not isinstance(module, VocabParallelEmbedding) and 0 < info.load_numel < num_needed:
            names.add(f"part of {name}")
    return names
