"""Sizes of a model, without reading weights: head size, and parameters from file headers or the configuration."""

import json
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from nemo_rl.files.regular_file import open_regular
from nemo_rl.models.huggingface.folders import TENSOR_FILES

if TYPE_CHECKING:  # the import takes seconds; a wrong configuration is reported before it
    from transformers import PretrainedConfig

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}
"""Shapes of parameters by configuration; making a large model takes a second, even on the meta device."""


def head_size(text: Any) -> int:
    """Return the size of an attention head, from the configuration of a text model with attention."""
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def longest_context(text: Any) -> int | None:
    """Return the most tokens that a text model reads, as vLLM derives them; None if its configuration does not say.

    Source: `vllm.config.model._get_and_verify_max_len`. Layers of several kinds may have limits of their own (None).
    """
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if not isinstance(positions, int) or any(isinstance(value, dict) for value in rope.values()):
        return None
    grows = rope.get("rope_type", "default") in ("linear", "dynamic")
    scaled = int(positions * (rope.get("factor") or 1.0)) if grows else positions
    return max(scaled, getattr(text, "model_max_length", None) or 0)


def count_parameters(model_name: str) -> int | None:
    """Count the elements of all tensors of a model folder, or of a hub model in the cache; None if unknown.

    For a folder with a configuration but no weights, the parameters of the described model are counted.
    """
    folder = Path(model_name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model_name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    try:
        counts = [_elements(path) for path in folder.glob(TENSOR_FILES)]
    except (OSError, ValueError, KeyError, struct.error):
        return None
    if not counts and (folder / "config.json").is_file():
        from transformers import AutoConfig

        return parameters_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    return sum(counts) or None


def parameters_of(config: "PretrainedConfig") -> int:
    """Count the parameters of the language model that a configuration describes, tied ones once."""
    return sum(map(prod, parameter_shapes(config).values()))


def expert_parameters_of(config: "PretrainedConfig") -> int:
    """Count those of its parameters that belong to experts among which tokens are divided."""
    return sum(prod(shape) for name, shape in parameter_shapes(config).items() if ".experts." in name)


def parameter_shapes(config: "PretrainedConfig") -> dict[str, tuple[int, ...]]:
    """Return the parameters of the language model that a configuration describes, tied ones once.

    The names are those of transformers, in which the experts of a layer are one parameter with a dimension for them.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    key = config.to_json_string(use_diff=False)
    if key not in _SHAPES:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # without initialisation, weights are not tied automatically
        _SHAPES[key] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return _SHAPES[key]


def _elements(path: Path) -> int:
    """Count the elements of a safetensors file, which begins with 8 bytes of length and a JSON header."""
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
