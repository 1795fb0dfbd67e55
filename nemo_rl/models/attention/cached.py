"""Attend to tokens of earlier passes, whose keys and values a cache keeps.

The tokens of a pass are one row of the model, laid end to end whichever sequence they belong to. Invariant: a token
sees the tokens of its own sequence up to itself.
"""

from dataclasses import dataclass

from torch import Tensor

from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, Scoring

type KeysAndValues = tuple[Tensor, Tensor]
"""A layer's `[places, H_kv, D]` keys and `[places, H_kv, D_v]` values."""


@dataclass(frozen=True)
class CachedPass:
    """The tokens of one pass, and the places in the cache that they and the tokens before them have."""

    token_ids: Tensor
    """`[T]` int64, the tokens that are read."""
    positions: Tensor
    """`[T]` int64, position of each token in its sequence."""
    new: Tensor
    """`[T]` int64, places of the tokens that are read."""
    seen: Tensor
    """`[K]` int64, places of all tokens of the sequences, sequence after sequence."""
    plan: AttentionPlan
    """Which of `seen` each token sees."""
    last: Tensor
    """`[b]` int64, index of the last token of each sequence among the T tokens."""
    num_places: int
    """Places of the cache."""
    layers: dict[int, KeysAndValues]
    """Cache of each layer by its number; a layer adds its own in its first pass."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Keep a layer's new keys and values, and compute the attention.

        Args:
            layer_number: number of the layer.
            query: `[T, 1, H, D]`.
            key: `[T, 1, H_kv, D]`.
            value: `[T, 1, H_kv, D_v]`.
            scoring: the layer's scale, window and sinks.

        Returns:
            `[T, 1, H * D_v]`.
        """
        if layer_number not in self.layers:
            self.layers[layer_number] = (self._empty_like(key), self._empty_like(value))
        keys, values = self.layers[layer_number]
        key, value = self._with_earlier(keys, key), self._with_earlier(values, value)
        out = attend(query.permute(1, 2, 0, 3), key, value, self.plan, scoring)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _with_earlier(self, kept: Tensor, new: Tensor) -> Tensor:
        """Keep `[T, 1, H, D]`; return `[1, H, K, D]` of all tokens that are seen."""
        kept.index_copy_(0, self.new, new[:, 0])
        return kept.index_select(0, self.seen).transpose(0, 1)[None]

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_empty(self.num_places, *new.shape[2:])
