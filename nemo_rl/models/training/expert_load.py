"""Measure how evenly tokens spread over the experts of each layer, in the same way for every training backend."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def load_metrics(counts: Iterable[Tensor], *, each_layer: bool = False) -> dict[str, float]:
    """Compute metrics from the numbers of tokens of each expert, summed over all ranks.

    Args:
        counts: for each layer, `[E]` tokens of each expert; layers without any token are skipped.
        each_layer: also return the three numbers of each layer alone, as `moe/layer_<n>/load_max` and so on, with `n`
            the layer's position in `counts`, from 0.

    Returns:
        `moe/load_max`: most tokens of an expert divided by the mean of its layer, in the worst layer;
        `moe/unused_experts`: share of experts without a token, mean over layers;
        `moe/load_entropy`: entropy of the distribution over experts, 1 if all have the same load, mean over layers.
        Empty if no layer has tokens.
    """
    numbered = {number: layer.double() for number, layer in enumerate(counts) if layer.any()}
    if not numbered:
        return {}
    alone: dict[str, float] = {}
    if each_layer:
        for number, layer in numbered.items():
            alone |= {f"moe/layer_{number}/{name[4:]}": value for name, value in load_metrics([layer]).items()}
    layers = list(numbered.values())
    return alone | {
        "moe/load_max": max((layer.max() / layer.mean()).item() for layer in layers),
        "moe/unused_experts": _mean([(layer == 0).double().mean().item() for layer in layers]),
        "moe/load_entropy": _mean([_entropy(layer) for layer in layers]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _entropy(counts: Tensor) -> float:
    """Compute the entropy divided by its largest value, `log E`."""
    shares = counts / counts.sum()
    return torch.special.entr(shares).sum().item() / math.log(len(counts)) if len(counts) > 1 else 1.0
