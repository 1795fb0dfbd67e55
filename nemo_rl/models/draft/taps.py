"""Keep hidden states of the policy that a draft model reads, while a training pass computes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Hooks on the embedding and on decoder layers.

    Invariant: nothing is kept outside `watching`, so a recomputation in the backward pass keeps nothing.

    Args:
        embedding: module whose output is the embedding of the tokens.
        layers: all decoder layers of the policy, in order.
        tapped_layers: the hidden states to keep, by the number of layers before them; 0 is the embedding.
        rows_of: returns the hidden states `[B, T, D]` of whole rows from the output of one of these modules.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[nn.Module],
        tapped_layers: Sequence[int],
        rows_of: Callable[[Any], Tensor],
    ) -> None:
        self._rows_of = rows_of
        self._tapped = tuple(tapped_layers)
        self._kept: dict[int, Tensor] = {}
        self._watching = False
        for number in {0, *tapped_layers}:
            module = embedding if number == 0 else layers[number - 1]
            module.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._watching:
                with torch.no_grad():
                    self._kept[number] = self._rows_of(output).detach()

        return keep

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hidden states of the forward pass in the block."""
        self._watching, self._kept = True, {}
        try:
            yield
        finally:
            self._watching, self._kept = False, {}

    def embedding(self) -> Tensor:
        """Return the kept embedding of the tokens."""
        return self._kept[0]

    def tapped(self) -> list[Tensor]:
        """Return the kept hidden states, in the order of `tapped_layers`."""
        return [self._kept[number] for number in self._tapped]
