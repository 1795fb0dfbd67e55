"""Build a small probe model with random weights, to test the code of a large model's architecture.

The large model may be without weights, or divided among many ranks. The probe model has the same configuration, but
only one layer of each kind, a smaller vocabulary, smaller feed-forward layers and fewer experts.

Invariant: a forward pass treats inputs, masks and positions like the large model. Only sizes differ.
"""

import logging
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ContextManagers

from nemo_rl.models.huggingface.layers import WITH_LAYERS, decoder_layers
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_VOCAB, _INNER = 512, 64
_GAIN = 2.4
"""Standard deviation of a projection's outputs for normalized inputs, so large that every operation has an effect."""
_NOISE = 0.1
_INNER_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
_LAYER_NUMBERS = (
    *("attn_layer_indices", "cross_attention_layers", "hybrid_layer_ids", "local_layer_ids", "mlp_only_layers"),
    *("moe_layers", "ple_layer_ids"),
)
"""Fields that list the numbers of the layers of a kind."""
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
CANNOT_BE_MADE = (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError)
"""Exceptions that classes of transformers raise for contradicting sizes in a configuration."""
_NOT_A_KIND = ("layer_idx", "layer_index", "layer_id", "layer_number", "training")
"""Attributes of modules that may differ between layers of the same kind."""


def small_probe_model(hf: PreTrainedModel) -> PreTrainedModel:
    """Build the probe model, in float32 on the CPU and in eval mode.

    The weights are the same in every call, and the state of the random generators is not changed.

    Args:
        hf: the model, on any device.

    Raises:
        ConfigError: the model has no list of layers, so it is not a decoder.
    """
    kind = type(hf)
    for form in (_of_few_small_layers, of_few_layers):
        try:
            return filled(form(kind, deepcopy(hf.config)))
        except ConfigError:
            raise
        except CANNOT_BE_MADE as error:
            logger.info("%s has no smaller form (%r): testing it with more of its layers.", kind.__name__, error)
    return filled(without_memory(kind, deepcopy(hf.config)))


def _of_few_small_layers(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    return of_few_layers(kind, smaller(config))


def of_few_layers(kind: type[PreTrainedModel], config: PretrainedConfig, least: int = 1) -> PreTrainedModel:
    """Build a model of a class on the meta device, with the first layer of each kind.

    The other layers are removed from a whole model. If the reduced configuration yields the same kinds of layers, the
    model is built again from it, because some models have modules whose size depends on the number of layers.

    Args:
        config: configuration with all layers; it is changed in place.
        least: smallest number of layers to keep, if the configuration has as many.

    Raises:
        ConfigError: the model has no list of layers, so it is not a decoder.
    """
    cut = without_memory(kind, config)
    if not _keep_kinds(cut, least):
        return cut
    try:
        made = without_memory(kind, deepcopy(cut.config))
    except CANNOT_BE_MADE:
        return cut
    kinds = [[_kind(layer) for layer in decoder_layers(model)] for model in (made, cut)]
    return made if kinds[0] == kinds[1] else cut


def without_memory(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of a class on the meta device."""
    made: Any = kind
    with ContextManagers(made.get_init_context(torch.float32, False, False, None)):
        model: PreTrainedModel = made(config)
    return model


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """Fill a model on the meta device with random weights. Return it in float32 on the CPU, in eval mode.

    The weights are the same in every call. Vectors get additional noise, so that biases and norms have an effect.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model.to_empty(device="cpu")
        model.tie_weights()
        _overwrite_memory(model)
        torch.manual_seed(0)
        model.initialize_weights()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(_NOISE * torch.randn_like(parameter))
    return model.float().eval()


def _overwrite_memory(model: PreTrainedModel) -> None:
    """Give every tensor defined values, because some classes initialize only a part of their tensors."""
    for parameter in model.parameters():
        parameter.normal_(std=_NOISE)
    for buffer in model.buffers():
        buffer.zero_()


def smaller(config: PretrainedConfig) -> PretrainedConfig:
    """Reduce vocabulary, feed-forward layers and experts in place. Heads, groups and masks do not depend on them."""
    text: Any = config.get_text_config()
    fit_weights(text)
    if isinstance(getattr(text, "vocab_size_per_layer_input", None), int):
        text.vocab_size_per_layer_input = min(text.vocab_size_per_layer_input, _VOCAB)
    if text.vocab_size > _VOCAB:
        text.vocab_size = _VOCAB
        for token, name in enumerate(_SPECIAL_TOKENS):
            if getattr(text, name, None) is not None:
                setattr(text, name, token)
    for name in _INNER_SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int):
            setattr(text, name, min(size, _INNER))
    for name in EXPERTS:
        count = getattr(text, name, None)
        if isinstance(count, int):
            setattr(text, name, min(count, _few_experts(text)))
    return config


def fit_weights(text: Any) -> None:
    """Set the standard deviation of random weights that suits the hidden size of a text configuration, in place."""
    hidden_size = getattr(text, "hidden_size", None)
    if isinstance(hidden_size, int) and hasattr(text, "initializer_range"):
        text.initializer_range = _GAIN / math.sqrt(hidden_size)


def _few_experts(text: Any) -> int:
    """Return a number of experts, in as many groups as before, of which a token can choose about half."""
    chosen = next((count for name in _CHOSEN if isinstance(count := getattr(text, name, None), int) and count), 1)
    groups = getattr(text, "n_group", None) or 1
    eligible = getattr(text, "topk_group", None) or 1
    return groups * max(2, math.ceil(2 * chosen / eligible))


def _keep_kinds(model: PreTrainedModel, least: int) -> bool:
    """Keep only the first layer of each kind, and update the configuration. Return whether a layer was removed."""
    layers = decoder_layers(model)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    holder = next((module for module in lists if layers[0] in [*module]), None)
    if holder is None:
        raise ConfigError(
            f"{type(model).__name__} has no list of decoder layers: {type(layers[0]).__name__} stands alone. "
            f"{WITH_LAYERS}"
        )
    kept = [*{repr(_kind(layer)): index for index, layer in reversed([*enumerate(layers)])}.values()][::-1]
    others = [index for index in range(len(layers)) if index not in kept]
    kept = sorted([*kept, *others[: max(0, least - len(kept))]])
    if len(holder) != len(layers) or len(kept) == len(layers):
        return False
    chosen = [layers[index] for index in kept]
    del holder[:]
    holder.extend(chosen)
    for position, layer in enumerate(chosen):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = position  # type: ignore[assignment]
    owned = [getattr(module, "config", None) for module in model.modules()]
    configs = [config.get_text_config() for config in owned if isinstance(config, PretrainedConfig)]
    for config in {id(config): config for config in configs}.values():
        _describe(config, kept, len(layers))
    return True


def _describe(config: PretrainedConfig, kept: list[int], before: int) -> None:
    """Update a configuration so that it describes only the layers that are kept."""
    values: Any = config
    fixed = _fixed_lengths(config, before)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and name in _LAYER_NUMBERS:
            value[:] = [place for place, index in enumerate(kept) if index in value]  # the model may hold this list
        elif isinstance(value, list) and len(value) == before != fixed.get(name):
            setattr(values, name, [value[index] for index in kept])
    if getattr(values, "num_hidden_layers", None) == before:
        values.num_hidden_layers = len(kept)
    spec: Any = getattr(values, "_heterogeneity_spec", None)
    if spec is not None:  # some fields of the configuration differ by layer
        overrides = {place: spec.per_layer_overrides.get(index) for place, index in enumerate(kept)}
        found = {place: fields for place, fields in overrides.items() if fields is not None}
        values._heterogeneity_spec = replace(spec, per_layer_overrides=found)


def _fixed_lengths(config: PretrainedConfig, layers: int) -> dict[str, int]:
    """Return the lengths of lists in the class's usual configuration, if that has another number of layers.

    A list that is as long there belongs to something else than layers, such as the five multipliers of Falcon-H1.
    """
    usual = None if config.has_no_defaults_at_init else type(config)()
    if usual is None or getattr(usual, "num_hidden_layers", layers) == layers:
        return {}
    return {name: len(value) for name, value in vars(usual).items() if isinstance(value, list)}


def _kind(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Describe a layer by its modules, the shapes of their weights and their plain attributes."""
    return [
        (
            name,
            type(module).__qualname__,
            [(key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)],
            [
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str | tuple | None) and key not in _NOT_A_KIND
            ],
        )
        for name, module in layer.named_modules()
    ]
