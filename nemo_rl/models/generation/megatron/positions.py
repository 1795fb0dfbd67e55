"""Give Megatron Core's rotary embeddings the positions of the tokens of a pass.

Megatron Core takes the tokens of a row to be at positions 0, 1, 2 ...; in a pass of an engine each sequence goes on at
its own position.
"""

from typing import Any

import torch
from torch import nn


class RotaryAtPositions(nn.Module):
    """A rotary embedding of Megatron Core that gives the angles at chosen positions, not at 0, 1, 2 ...

    Args:
        most_positions: number of positions that it is asked for.
    """

    def __init__(self, rotary: Any, most_positions: int) -> None:
        super().__init__()
        self._rotary, self._most_positions = rotary, most_positions
        self.positions = torch.empty(0, dtype=torch.int64)
        """`[T]` int64, positions of the tokens of the next pass."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of positions, whatever the length of the input is."""
        return self._most_positions

    def forward(self, seq_len: int, **kwargs: Any) -> Any:
        """Return `[T, 1, 1, D]` angles; of YaRN a tuple with its factor."""
        angles = self._rotary(seq_len)
        if isinstance(angles, tuple):
            return (angles[0].index_select(0, self.positions), *angles[1:])
        return angles.index_select(0, self.positions)


def use_positions(model: nn.Module, most_positions: int) -> list[RotaryAtPositions]:
    """Replace the rotary embeddings of a GPTModel, its own and those of latent attention; return the replacements."""
    replacements = []
    for holder in list(model.modules()):
        if isinstance(rotary := getattr(holder, "rotary_pos_emb", None), nn.Module):
            replacements.append(RotaryAtPositions(rotary, most_positions))
            holder.rotary_pos_emb = replacements[-1]
    return replacements
