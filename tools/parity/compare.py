"""Compute the differences between two runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.reference import Numbers

_NEGLIGIBLE = 1e-4
"""Gradients below this share of the model's largest are zero except for rounding (biases of keys); then the difference
is relative to this share of the largest."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences over all updates.

    Attributes:
        loss: difference of a loss.
        gradient: difference of any entry of any gradient, relative to the largest entry of that tensor.
        worst: name of that tensor.
        norm: difference of the gradient norm.
        logprob: difference of a log-probability, relative to the largest.
    """

    loss: float
    gradient: float
    worst: str
    norm: float
    logprob: float

    @property
    def largest(self) -> float:
        """The largest of these differences."""
        return max(self.loss, self.gradient, self.norm, self.logprob)


def difference(ours: Numbers, reference: Numbers) -> Difference:
    """Compare two runs.

    Raises:
        ValueError: they have gradients of different parameters.
    """
    gradient, worst = 0.0, ""
    for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
        if mine.keys() != theirs.keys():
            raise ValueError(f"gradients of different parameters: {sorted(mine.keys() ^ theirs.keys())}")
        least = _NEGLIGIBLE * max(value.abs().max().item() for value in theirs.values())
        for name, value in theirs.items():
            far = _relative(mine[name], value, least)
            if far >= gradient:
                gradient, worst = far, name
    losses = [abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(ours.norms, reference.norms, strict=True)]
    logprobs = [_relative(a, b, 0.0) for a, b in zip(ours.logprobs, reference.logprobs, strict=True)]
    return Difference(max(losses), gradient, worst, max(norms), max(logprobs))


def _relative(a: Tensor, b: Tensor, least: float) -> float:
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    return (a - b).abs().max().item() / max(b.abs().max().item(), least)
