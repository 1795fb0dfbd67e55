"""Load new weights into a running vLLM model and record outputs of layers, with functions that run in vLLM's worker.

vLLM rearranges weights after loading: packed matrix products and experts, absorbed attention projections. An update
uses vLLM's own layerwise reload on every platform. Layers first take the layout of a checkpoint. When the last tensor
of a layer has arrived, the layer is rearranged again, into its existing storage (so CUDA graphs stay valid).

The reload does not support three cases of packing on CPUs, which are handled here: experts are packed only with a new
kernel, a tied output head has a separate packed copy, and Mamba-2 keeps a copy of a convolution that is packed. GPT-OSS
copies some tensors without vLLM's loaders, so a reload would lose them. Therefore attention sinks are not moved, and
experts are passed one by one. Invariant: after `finish_reload` the model answers with the tensors that were loaded.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform

from nemo_rl.models.generation.vllm.drafting import OwnModules, is_for, load_into_draft, trained_draft
from nemo_rl.models.generation.vllm.recurrent import SentTensors, altered, note_sent
from nemo_rl.models.huggingface.layers import recorded_outputs
from nemo_rl.models.training.tensor_checks import ANOTHER_COPY, listed, not_finite
from nemo_rl.utils.errors import NonFiniteError
from nemo_rl.weight_sync.parts import BlocksByName, ReadRecorder

_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Parameters of attention in `vllm.model_executor.layers.quantization.kv_cache`, which are never sent."""
_GPT_OSS_NAMES = {"gate_up_proj": "w13", "down_proj": "w2"}


def begin_reload(worker: Any) -> None:
    """Prepare the model for tensors in the layout of checkpoints.

    An interrupted previous update is closed first, so that its tensors are not counted for the new update.
    """
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if any(get_layerwise_info(module).can_load() for module in model.modules()):
            finalize_layerwise_reload(model, worker.model_runner.model_config)
            if worker.draft_modules is not None:
                finalize_layerwise_reload(worker.draft_modules, worker.model_runner.model_config)
        worker.tied_heads = tied_heads(model)
        initialize_layerwise_reload(model)
        for module in model.modules():
            if "sinks" in module._parameters:
                info = get_layerwise_info(module)
                _place_kernel_tensors(module, info)
                info.reset()
        draft = trained_draft(worker)
        worker.draft_modules = None if draft is None else OwnModules(draft, model)
        if worker.draft_modules is not None:
            initialize_layerwise_reload(worker.draft_modules)
    if current_platform.is_cpu():
        for module in (*model.modules(), *(worker.draft_modules.modules() if worker.draft_modules else ())):
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
    worker.unbound = {name for name, _ in model.named_parameters()}
    worker.sent_to_recurrent_layers = SentTensors()


def tied_heads(model: torch.nn.Module) -> set[str]:
    """Return the weight names of output heads that share their storage with an embedding.

    vLLM may tie a head that is not tied in the configuration. If the files contain a copy of the embedding as the head,
    vLLM reads the copy, and then ties both because they are equal.
    """
    holders = [(name, each) for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)]
    embeddings = {_storage(each) for _, each in holders if not isinstance(each, ParallelLMHead)} - {0}
    return {
        f"{name}.weight" for name, each in holders if isinstance(each, ParallelLMHead) and _storage(each) in embeddings
    }


def _storage(layer: torch.nn.Module) -> int:
    """Return the address of a layer's weight, or 0 if the layer has no weight or no memory for it."""
    weight = getattr(layer, "weight", None)
    return weight.untyped_storage().data_ptr() if isinstance(weight, torch.Tensor) else 0


def load_tensors(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load tensors, of which each rank takes its part."""
    runner = worker.model_runner
    given: Iterable[tuple[str, torch.Tensor]] = tensors
    recorder = recorder_of(worker)
    if recorder is not None:
        given = [(name, tensor.clone()) for name, tensor in tensors]
        recorder.watch(given)
    model = runner.model_config
    if model.hf_text_config.model_type == "gpt_oss" and model.model_impl != "transformers":
        given = one_by_one(given)
    given, draft = list(given), trained_draft(worker)
    note_sent(worker.sent_to_recurrent_layers, given)
    of_draft = [] if draft is None else [each for each in given if is_for(draft, each[0])]
    own = [each for each in given if draft is None or not is_for(draft, each[0])]
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), recorder or nullcontext():
        worker.unbound -= set(runner.get_model().load_weights(iter(own)))
        if draft is not None and of_draft:
            load_into_draft(draft, of_draft)


def record_reads(worker: Any) -> None:
    """Record which parts of tensors the worker reads in the next update."""
    worker.recorder = ReadRecorder()


def take_reads(worker: Any) -> BlocksByName:
    """Stop recording, and return the parts that were read since `record_reads`."""
    recorder: ReadRecorder = worker.recorder
    worker.recorder = None
    return recorder.reads


def recorder_of(worker: Any) -> ReadRecorder | None:
    """Return the recorder of a worker, or None if the worker does not record."""
    return getattr(worker, "recorder", None)


def one_by_one(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield GPT-OSS's experts under the names of single experts, and all other tensors unchanged."""
    for name, tensor in tensors:
        stack = _STACKED_EXPERTS.fullmatch(name)
        if stack is None:
            yield name, tensor
            continue
        layer, projection, bias = stack.groups()
        kind = f"{_GPT_OSS_NAMES[projection]}_{'bias' if bias else 'weight'}"
        yield from ((f"{layer}.{expert}.{kind}", part) for expert, part in enumerate(tensor))


def finish_reload(worker: Any) -> list[str]:
    """Activate the loaded tensors.

    Returns:
        Names of the engine's parameters that need a tensor but got none, and of layers that got only some of their
        tensors. A tied output head shares the embedding's storage and needs none.
    """
    model = worker.model_runner.get_model()
    unbound = worker.unbound | lost_tensors(model, worker.unbound)
    heads = {name: m for name, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    if getattr(worker.model_runner.model_config.hf_text_config, "tie_word_embeddings", False):
        unbound = unbound - {f"{name}.weight" for name in heads}
    unbound = unbound - worker.tied_heads
    unbound = without_cache_scales(unbound) | incomplete_layers(model)
    draft: OwnModules | None = worker.draft_modules
    if draft is not None:
        unbound |= without_cache_scales(lost_tensors(draft, set())) | incomplete_layers(draft)
    recorder = recorder_of(worker)
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), recorder or nullcontext():
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if draft is not None:
            finalize_layerwise_reload(draft, worker.model_runner.model_config)
        if current_platform.is_cpu():
            for head in heads.values():
                head.quant_method.process_weights_after_loading(head)
        for module in model.modules():
            if isinstance(module, MambaMixer2):
                _renew_convolution(module)
    return sorted(unbound)


def altered_weights(worker: Any) -> list[str]:
    """Return names of weights that differ from what the last update sent. Only recurrent layers are compared."""
    return altered(worker.model_runner.get_model(), worker.sent_to_recurrent_layers)


def _renew_convolution(mixer: MambaMixer2) -> None:
    """Copy the new weights into a mixer's convolution, without packing if vLLM has packed them for a CPU."""
    convolution: Any = mixer.conv1d
    held: Any = mixer.conv_weights
    plain = getattr(convolution, "_cpu_unpacked_conv_weight", None)
    held.copy_(convolution.weight.view_as(held) if plain is None else plain)


@contextmanager
def refusing_non_finite(model_name: str) -> Iterator[None]:
    """Check each tensor that vLLM reads from files in the block. Packed tensors could not be checked later.

    Raises:
        NonFiniteError: Tensors contain NaN or infinity. The error lists them, and is raised at the end of the block.
    """
    loader_class: Any = DefaultModelLoader
    read = loader_class.get_all_weights
    spoilt: list[str] = []

    def watched(loader: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(loader, *args, **kwargs):
            # # On the host, the check of a large model would take seconds, because Ray allows a worker only one thread.
            spoilt.extend(not_finite({name: tensor.to(current_platform.device_type)}))
            yield name, tensor

    loader_class.get_all_weights = watched
    try:
        yield
    finally:
        loader_class.get_all_weights = read
    if spoilt:
        raise NonFiniteError(f"The weights of the model {model_name} are not finite: {listed(spoilt)}. {ANOTHER_COPY}")


def non_finite_parameters(worker: Any) -> list[str]:
    """Return vLLM's names of the model's parameters whose values in vLLM are not finite."""
    return not_finite(dict(worker.model_runner.get_model().named_parameters()))


def without_cache_scales(names: set[str]) -> set[str]:
    """Return the names without those of scales of a float8 cache, which float8 models have and which stay 1."""
    return {name for name in names if name.rpartition(".")[2] not in _CACHE_SCALES}


def lost_tensors(model: torch.nn.Module, unbound: set[str]) -> set[str]:
    """Return parameters that the model reports as loaded, although no tensors arrived for their layers."""
    names = set()
    for layer, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.load_numel == 0 and info.load_numel_total:
            names |= {f"{layer}.{own}" for own, _ in module.named_parameters(recurse=False)} - unbound
    return names


def incomplete_layers(model: torch.nn.Module) -> set[str]:
    """Return the names of layers that lack some of their tensors (query, key and value in one layer, or experts).

    vLLM would leave the rest uninitialized. Embeddings are excluded, because they are padded.
    """
    names = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        num_needed = info.load_numel_total or 0
        if not isinstance(module, VocabParallelEmbedding) and 0 < info.load_numel < num_needed:
            names.add(f"part of {name}")
    return names


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

    The list is empty if a layer was not called, as in CUDA graphs that vLLM replays in pieces for some architectures
    (DeepSeek V3.2, GLM-5).
    """
    stack, outputs, num_layers = worker.recording
    stack.close()
    recorded: list[Tensor] = outputs
    return recorded if len(recorded) >= num_layers else []


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the model's longest module list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def residual_sum(output: Any) -> Tensor:
    """Return the hidden states after a layer, with the last addition, which vLLM computes in the next layer."""
    if not isinstance(output, tuple):
        hidden: Tensor = output
        return hidden
    hidden, residual = output[:2]
    return hidden if residual is None else hidden + residual


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run prompts through the modules themselves, because compiled copies do not call hooks."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", None) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
