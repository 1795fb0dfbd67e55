"""Find and freeze the parts of a model, and record the outputs of layers in a forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nemo_rl.config import PolicyConfig
from nemo_rl.data.images.families import FAMILIES, PROJECTORS
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    # # The controller imports this file without needing this slow import.
    from transformers import PreTrainedModel


def body(hf: "PreTrainedModel") -> nn.Module:
    """Return the model without its head, or the model itself if it has no such part.

    For a model of `images.families`, this includes the modules that read images. For any other model that reads more
    than text, it is the text model, which gives the same results for text as the whole model.
    """
    return _whole(hf) if hf.config.model_type in FAMILIES else text_model(hf)


def _whole(hf: "PreTrainedModel") -> nn.Module:
    """Return the model without its head. In Llama 4's text models, its name is not their `base_model_prefix`."""
    whole: nn.Module = hf.base_model if hf.base_model is not hf else getattr(hf, "model", hf)
    return whole


def text_model(hf: "PreTrainedModel") -> nn.Module:
    """Return the part of the model that reads token embeddings, without the head."""
    whole = _whole(hf)
    text = hf.config.get_text_config()
    if text is hf.config:
        return whole
    of_text = (module for module in whole.modules() if getattr(module, "config", None) is text)
    return next((module for module in of_text if hasattr(module, "layers")), whole)


def parts_without_text(hf: "PreTrainedModel") -> list[nn.Module]:
    """Return the modules that read images or sound, such as a vision tower, or an empty list for a text model."""
    whole, text = hf.base_model, text_model(hf)
    if hf.config.get_text_config() is hf.config or text is whole or text is hf:
        return []
    around = {id(module) for module in whole.modules() if any(part is text for part in module.modules())}
    outer = [module for module in whole.modules() if id(module) in around and module is not text]
    head = hf.get_output_embeddings()
    return [part for module in outer for part in module.children() if id(part) not in around and part is not head]


def freeze_parts(hf: "PreTrainedModel", config: PolicyConfig) -> None:
    """Exclude parts of a model from training, in place: those that `freeze_config` names, or all that read no text.

    Raises:
        ConfigError: no part is left to train.
    """
    asked = config.dtensor_cfg.automodel_kwargs.freeze_config
    names = {id(module): name for name, module in hf.named_modules()}
    for part in parts_without_text(hf):
        for module in (part, *part.modules()):
            projects = names[id(module)].rpartition(".")[2] in PROJECTORS
            frozen = asked.freeze_vision_projection if projects else asked.freeze_vision_tower
            if projects or module is part:
                module.requires_grad_(config.is_vlm and not frozen)
    if asked.freeze_language_model:
        for module in (text_model(hf), hf.get_output_embeddings()):
            module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in hf.parameters()):
        raise ConfigError("policy.dtensor_cfg.automodel_kwargs.freeze_config leaves no part of the model to train.")


SCORE_HEAD = "score"
"""Name of the head in the sequence classifiers of transformers."""


def score_head(hf: nn.Module) -> nn.Linear | None:
    """Return the head of a sequence classifier, or None for a language model, or for a stage without the head."""
    head = getattr(hf, SCORE_HEAD, None)
    return head if isinstance(head, nn.Linear) else None


def hidden_states(hf: "PreTrainedModel", model_inputs: dict[str, Any]) -> Tensor:
    """Return the body's output `[b, T, D]` for the keyword arguments of the model."""
    hidden: Tensor = body(hf)(**model_inputs, use_cache=False).last_hidden_state
    return hidden


WITH_LAYERS = "Models that read from left to right can be trained here; choose one of these, also as a reward model."


def decoder_layers(hf: "PreTrainedModel") -> list[nn.Module]:
    """Return the decoder's repeated blocks, which are the units of sharding, in order.

    Raises:
        ConfigError: the architecture has no list of layers.
    """
    layers = getattr(text_model(hf), "layers", None)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    names = set(hf._no_split_modules or ())
    blocks = [module for module in hf.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(f"{type(hf).__name__} has no list of decoder layers to shard by. {WITH_LAYERS}")
    return blocks


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states in the output of a `transformers` decoder layer."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@contextmanager
def recorded_outputs(
    layers: Sequence[nn.Module], hidden_of: Callable[[Any], Tensor] = first_tensor
) -> Iterator[list[Tensor]]:
    """Collect the hidden states after each layer while the block runs.

    Args:
        layers: modules called in this order by a forward pass.
        hidden_of: selects `[..., T, D]` from the output of a layer.

    Yields:
        A list to which each call of a layer appends `[T, D]`, float32 on the CPU, with all rows concatenated.
    """
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(hidden_of(output).detach().flatten(0, -2).float().cpu())

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
