"""Sizes of a model: parameters, from the headers of its files or its configuration, and heads; no weight is read."""

import json
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from nemo_rl.models.huggingface.folders import TENSOR_FILES

if TYPE_CHECKING:  # they take seconds to import, and a wrong configuration is answered before
    from transformers import PretrainedConfig

_COUNTED: dict[str, int] = {}
"""By configuration; making a large model takes a second, even without memory."""


def head_size(text: Any) -> int:
    """Numbers of an attention head, from the configuration of a text model that has attention."""
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def count_parameters(model_name: str) -> int | None:
    """Elements of all tensors of a model folder, or of a hub model that is in the cache; None where unknown.

    A folder with a configuration and no weights has those of that model.
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

        return parameters_of(AutoConfig.from_pretrained(folder))
    return sum(counts) or None


def parameters_of(config: "PretrainedConfig") -> int:
    """Parameters of the language model that a configuration describes, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    key = config.to_json_string(use_diff=False)
    if key not in _COUNTED:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # what is not initialised is not tied either
        _COUNTED[key] = sum(parameter.numel() for parameter in model.parameters())
    return _COUNTED[key]


def _elements(path: Path) -> int:
    """Elements of the tensors of a safetensors file: 8 bytes of length, then a JSON header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
