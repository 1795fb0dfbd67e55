"""Count the parameters of a model and the floating-point operations of its passes, without reading weights.

Numbers of parameters come from file headers or from the configuration. For operations, the model is made on torch's
meta device, so that the shapes come from the code of the architecture itself.

Operations are counted as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a multiplication with an
addition is two operations; only matrix products count; attention counts as if it were not causal; recomputation does
not count. For a sequence of T tokens and a dense model this is `6 N + 12 L H Q T` operations per trained token, with N
weights in matrix products, L layers and H heads of dimension Q. A forward pass alone is a third of that.

A recurrent layer counts in its recurrent form: a token multiplies a state of `rows x columns` elements in each head.
Mamba writes and reads it once (Dao and Gu 2024, arXiv:2405.21060, equation 1). The gated delta rule also reads it
before the write (Yang et al. 2024, arXiv:2412.06464, equation 10). Chunks of tokens need more operations, which do not
count.

Invariant: weights that are not in a matrix product of a token are not counted: embeddings, norms, biases, and experts
to which the token is not sent. In a model with image or audio towers, only decoder and head are counted.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from nemo_rl.files.hub_download import cached_file
from nemo_rl.files.regular_file import open_regular
from nemo_rl.models.huggingface.folders import TENSOR_FILES
from nemo_rl.models.huggingface.layers import decoder_layers
from nemo_rl.models.huggingface.mixers import mixer_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}
"""Cache of parameter shapes by configuration. Making a large model on the meta device takes a second."""


def head_size(text: Any) -> int:
    """Return the size of an attention head, from the configuration of a text model with attention."""
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def longest_context(text: Any) -> int | None:
    """Return the largest number of tokens of a sequence that a text model accepts, or None if it is unknown.

    The rules are those of `vllm.config.model._get_and_verify_max_len`. Limits that differ between layers give None.
    """
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if not isinstance(positions, int) or any(isinstance(value, dict) for value in rope.values()):
        return None
    grows = rope.get("rope_type", "default") in ("linear", "dynamic")
    scaled = int(positions * (rope.get("factor") or 1.0)) if grows else positions
    return max(scaled, getattr(text, "model_max_length", None) or 0)


def count_parameters(model_name: str) -> int | None:
    """Return the number of parameters of a model folder or of a cached hub model, or None if it is unknown.

    If a folder has a configuration but no weights, the parameters of the described model are counted.
    """
    folder = Path(model_name)
    if not folder.is_dir():
        cached = cached_file(model_name, "config.json")
        if cached is None:
            return None
        folder = cached.parent
    try:
        counts = [_elements(path) for path in folder.glob(TENSOR_FILES)]
    except (OSError, ValueError, KeyError, struct.error):
        return None
    if not counts and (folder / "config.json").is_file():
        from nemo_rl.models.huggingface.load import read_config

        return parameters_of(read_config(folder))
    return sum(counts) or None


def parameters_of(config: "PretrainedConfig") -> int:
    """Return the number of parameters of the language model in a configuration. Tied parameters are counted once."""
    return sum(map(prod, parameter_shapes(config).values()))


def expert_parameters_of(config: "PretrainedConfig") -> int:
    """Return the number of parameters that belong to routed experts."""
    return sum(prod(shape) for name, shape in parameter_shapes(config).items() if ".experts." in name)


def parameter_shapes(config: "PretrainedConfig") -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of the language model in a configuration. Tied ones occur once.

    The names are those of transformers, where the experts of a layer are one parameter with an additional dimension.
    """
    import torch
    from transformers.initialization import no_init_weights

    from nemo_rl.models.huggingface.load import auto_class

    key = config.to_json_string(use_diff=False)
    if key not in _SHAPES:
        with torch.device("meta"), no_init_weights():
            model = auto_class(config).from_config(config)
        model.tie_weights()  # the model was not initialised, so weights are not tied
        _SHAPES[key] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return _SHAPES[key]


def _elements(path: Path) -> int:
    """Return the number of elements in a safetensors file, from the JSON header after the 8 bytes of its length."""
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


PEAK_BF16_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800 PCIe": 756.0,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX A6000": 154.8,
}
"""Peak dense TFLOP/s in bfloat16 and float16 (data sheets), by words in a device's name. The first match is used."""

_PARTS_OF_GPUS = re.compile(r"\b(MIG|Laptop)\b")
"""Words in a device's name that mark a part of a GPU or a slower GPU of the same name."""

_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_k")
"""Names in configurations for the number of experts to which a token is sent."""

_WITHOUT_ATTENTION = ("linear_attention", "conv", "moe", "mlp")
"""Kinds of layers without attention: their matrix products are those with their weights and with recurrent states."""
_WITH_ATTENTION = ("full_attention", "attention", "hybrid")
"""Kinds of layers whose attention sees all tokens. A `hybrid` layer also has a recurrent part."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak bfloat16 TFLOP/s of a device for dense matrices, or None if it is not known."""
    name = device_name.replace("-", " ")
    if _PARTS_OF_GPUS.search(name):
        return None
    return next((peak for words, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """Counts for computing the number of a model's operations for sequences of any length."""

    trained: float
    """Number of trained weights by which each token is multiplied."""
    frozen: float
    """Number of frozen weights by which each token is multiplied (the base of adapters)."""
    attention: tuple[tuple[int, int | None, int], ...]
    """Items (width, window, layers) for each kind of attention: the sizes of queries and values over all heads, summed,
    the largest number of tokens that a token sees (None for all), and the number of such layers."""
    states: float = 0.0
    """Number of multiplications of each token with the states of recurrent layers."""

    def forward(self, lengths: Mapping[int, int]) -> float:
        """Return the number of operations of a forward pass over unpadded sequences, given as counts by length."""
        products = 2.0 * (self.trained + self.frozen + self.states) * _tokens(lengths)
        for width, window, layers in self.attention:
            pairs = sum(float(length) * min(length, window or length) * count for length, count in lengths.items())
            products += 2.0 * width * layers * pairs
        return products

    def training(self, lengths: Mapping[int, int]) -> float:
        """Return the number of operations of forward and backward pass. Gradients of frozen weights are not counted.

        The gradient of the first layer's input is counted even if a frozen model does not need it.
        """
        return 3.0 * self.forward(lengths) - 2.0 * self.frozen * _tokens(lengths)


def _tokens(lengths: Mapping[int, int]) -> float:
    return float(sum(length * count for length, count in lengths.items()))


def model_flops(
    config: "PretrainedConfig",
    *,
    scores: bool = False,
    adapters: int = 0,
    adapted: Callable[[list[str]], Iterable[str]] = tuple,
) -> ModelFlops:
    """Count the operations of a causal language model.

    Args:
        scores: whether the model has a scalar head instead of one for the vocabulary.
        adapters: rank of low-rank adapters on a frozen model; 0 without adapters.
        adapted: function that selects the layers with adapters from the names of all linear layers except the head.

    Raises:
        ValueError, KeyError: transformers has no causal language model for the configuration, or it has layers that
            cannot be counted.
    """
    import torch
    from transformers.initialization import no_init_weights

    from nemo_rl.models.huggingface.load import auto_class

    with torch.device("meta"), no_init_weights():
        hf = auto_class(config).from_config(config)
    text: Any = config.get_text_config()
    head = hf.get_output_embeddings()
    of_tokens = _computed(hf)
    multiplied = sum(_multiplied((part for part in of_tokens if not scores or part is not head), _active_experts(text)))
    if scores:
        multiplied += text.hidden_size
    added = 0
    if adapters:
        linears = {name: part for name, part in hf.named_modules() if isinstance(part, nn.Linear) and part is not head}
        chosen = [part for name in adapted(list(linears)) if (part := linears[name]) in of_tokens]
        added = sum(adapters * (part.in_features + part.out_features) for part in chosen)
    trained, frozen = (float(added), multiplied) if adapters else (multiplied, 0.0)
    return ModelFlops(trained, frozen, tuple(_attention(text)), float(sum(_of_states(of_tokens))))


def _computed(hf: Any) -> list[nn.Module]:
    """Return the modules of decoder and head.

    Raises:
        ValueError: layers share weights, of which each layer may use another part.
    """
    hf.tie_weights()  # the model was not initialised, so weights are not tied
    held = [id(parameter) for layer in decoder_layers(hf) for parameter in layer.parameters()]
    if len(held) != len(set(held)):
        raise ValueError(f"the layers of {type(hf).__name__} share weights, which cannot be counted")
    return list(dict.fromkeys([*hf.get_decoder().modules(), hf.get_output_embeddings()]))


def _of_states(modules: Iterable[Any]) -> Iterator[int]:
    """Yield the number of multiplications of a token with the state of each recurrent layer.

    Raises:
        ValueError: the sizes of a layer with decays (`A_log`) are not known.
    """
    for module in modules:
        mixer = mixer_of(module)
        if mixer is not None:
            yield mixer.products
        elif hasattr(module, "slope_rate"):  # lightning attention
            yield 2 * module.num_attention_heads * module.head_dim**2
        elif hasattr(module, "rg_lru") or (hasattr(module, "A_log") and hasattr(module, "conv1d")):
            raise ValueError(f"the state of {type(module).__name__} cannot be counted")


def _active_experts(text: Any) -> int | None:
    return next((int(value) for name in _ACTIVE_EXPERTS if (value := getattr(text, name, None))), None)


def _multiplied(modules: Iterable[nn.Module], active: int | None) -> Iterator[float]:
    """Yield the number of elements of each matrix by which a token is multiplied. Only active experts are included.

    Embeddings are skipped, so a weight that head and embedding share is counted once.
    """
    for module in modules:
        if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or name.endswith("bias"):
                continue
            share = 1.0
            if parameter.dim() == 3:
                if active is None:
                    raise ValueError(
                        f"the weight {name} of {type(module).__name__} is of experts, and the configuration does "
                        f"not say how many of them a token has ({', '.join(_ACTIVE_EXPERTS)})"
                    )
                share = min(1.0, active / parameter.shape[0])
            yield parameter.numel() * share


def _attention(text: Any) -> list[tuple[int, int | None, int]]:
    """Return `ModelFlops.attention`, without layers of linear attention."""
    windows = Counter(_windows(text))
    if not windows:
        return []
    head = head_size(text)
    latent = getattr(text, "kv_lora_rank", None)
    query = text.qk_nope_head_dim + text.qk_rope_head_dim if latent else head
    value = getattr(text, "v_head_dim", None) or head
    width = text.num_attention_heads * (query + value)
    return [(width, window, count) for window, count in windows.items()]


def _windows(text: Any) -> Iterator[int | None]:
    """Yield, for each layer with attention, the largest number of tokens that a token sees, or None for all."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        yield from [window] * text.num_hidden_layers
        return
    for kind in kinds:
        if kind == "sliding_attention":
            yield window
        elif kind == "chunked_attention":
            yield getattr(text, "attention_chunk_size", None)
        elif kind in _WITH_ATTENTION:
            yield None
        elif kind not in _WITHOUT_ATTENTION:
            raise ValueError(f"layers of the kind {kind} cannot be counted")
