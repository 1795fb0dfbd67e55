"""Free what Transformer Engine keeps for products in float8."""

from collections.abc import Iterable

from torch import nn

_COPIES = "_fp8_workspaces"
"""Attribute of Transformer Engine's layers: their weights in float8, by name, made in the first pass of an update."""


def free_float8_copies(chunks: Iterable[nn.Module]) -> None:
    """Free the float8 copies of the weights; the next pass makes them again. Other layers have none."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, _COPIES, {}).clear()
