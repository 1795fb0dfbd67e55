"""Count the floating-point operations of a model's passes from its configuration, and list the peaks of devices.

The model is made on torch's meta device, so the shapes come from the real code of the architecture. Convention (PaLM,
Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a multiplication with an addition counts as two operations; only
matrix products count; attention counts as if it were not causal; recomputation does not count. For a sequence of T
tokens and a dense model this is `6 N + 12 L H Q T` operations per trained token, with N multiplied weights, L layers
and H heads of dimension Q. A forward pass alone is a third of that.

Invariant: a weight that multiplies nothing is not counted: an embedding that is only looked up, norms, biases, and
experts that a token is not sent to. Of a model with image or audio towers only the decoder and the head are counted.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # the import takes seconds; the controller only computes with a finished count
    from transformers import PretrainedConfig

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
"""Words of a device's name -> dense peak in bfloat16 and float16, by makers' data sheets; the first match counts."""

_PARTS_OF_GPUS = re.compile(r"\b(MIG|Laptop)\b")
"""Words in the names of instances that have a part of a GPU, and of slower ones of the same name."""

_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_k")
"""Names that configurations have for the experts that a token is sent to."""

_WITHOUT_ATTENTION = ("linear_attention", "conv", "moe")
"""Kinds of layers whose matrix products are those of their weights."""


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a device; None if unknown."""
    name = device_name.replace("-", " ")
    if _PARTS_OF_GPUS.search(name):
        return None
    return next((peak for words, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """The operations of a model, for sequences of any length."""

    trained: float
    """Weights that multiply each token and get gradients."""
    frozen: float
    """Weights that multiply each token and get none (a model under adapters)."""
    attention: tuple[tuple[int, int | None, int], ...]
    """(width, window, layers): the sizes of a layer's queries and of its values over all heads, summed; the tokens that
    a token sees at most, None for all; and the number of such layers."""

    def forward(self, lengths: Mapping[int, int]) -> float:
        """Return the operations of a forward pass over sequences, without padding.

        Args:
            lengths: length of a sequence -> number of such sequences.
        """
        products = 2.0 * (self.trained + self.frozen) * _tokens(lengths)
        for width, window, layers in self.attention:
            pairs = sum(float(length) * min(length, window or length) * count for length, count in lengths.items())
            products += 2.0 * width * layers * pairs
        return products

    def training(self, lengths: Mapping[int, int]) -> float:
        """Return the operations of forward and backward pass; frozen weights need no gradients of their own.

        With a frozen model the gradient of the first layer's input is counted too, although nothing needs it.
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
        config: configuration of the model.
        scores: whether the model has a scalar head instead of one for the vocabulary.
        adapters: rank of low-rank adapters on a frozen model; 0 without adapters.
        adapted: selects the layers with adapters among the names of the linear layers, the head excepted.

    Raises:
        ValueError, KeyError: transformers has no causal language model for the configuration, or it has layers that
            cannot be counted.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        hf = AutoModelForCausalLM.from_config(config)
    text: Any = config.get_text_config()
    head = hf.get_output_embeddings()
    of_tokens = dict.fromkeys([*hf.get_decoder().modules(), head])
    multiplied = sum(_multiplied((part for part in of_tokens if not scores or part is not head), _active_experts(text)))
    if scores:
        multiplied += text.hidden_size
    added = 0
    if adapters:
        linears = {name: part for name, part in hf.named_modules() if isinstance(part, nn.Linear) and part is not head}
        chosen = [part for name in adapted(list(linears)) if (part := linears[name]) in of_tokens]
        added = sum(adapters * (part.in_features + part.out_features) for part in chosen)
    trained, frozen = (float(added), multiplied) if adapters else (multiplied, 0.0)
    return ModelFlops(trained, frozen, tuple(_attention(text)))


def _active_experts(text: Any) -> int | None:
    return next((int(value) for name in _ACTIVE_EXPERTS if (value := getattr(text, name, None))), None)


def _multiplied(modules: Iterable[nn.Module], active: int | None) -> Iterator[float]:
    """Yield the elements of each matrix that a token is multiplied with; of experts the active ones.

    A head that shares its weight with the embedding is a module of its own, so it is counted once, as a head.
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
                        f"the weight {name} of {type(module).__name__} is of experts, and the "
                        f"configuration does not say how many of them a token has ({', '.join(_ACTIVE_EXPERTS)})"
                    )
                share = min(1.0, active / parameter.shape[0])
            yield parameter.numel() * share


def _attention(text: Any) -> list[tuple[int, int | None, int]]:
    """Return the width and the window of the layers with attention; layers of linear attention have none."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    query = text.qk_nope_head_dim + text.qk_rope_head_dim if latent else head
    value = getattr(text, "v_head_dim", None) or head
    width = text.num_attention_heads * (query + value)
    return [(width, window, count) for window, count in Counter(_windows(text)).items()]


def _windows(text: Any) -> Iterator[int | None]:
    """Yield the tokens that a token of each layer with attention sees at most."""
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
        elif kind in ("full_attention", "attention"):
            yield None
        elif kind not in _WITHOUT_ATTENTION:
            raise ValueError(f"layers of the kind {kind} cannot be counted")
