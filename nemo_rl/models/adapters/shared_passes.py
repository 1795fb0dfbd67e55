"""Compute the rows of several adapters in one pass over the base.

    tokens of a microbatch ─► base layer, all together ─► + product of each adapter for its own tokens

Invariant: a token gets the product of its adapter only, so no value of one adapter reaches the rows of another. A
gradient that is not finite does reach the head of the others (`AdapterPolicy.run_passes` repeats such passes).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.distributed.parallel_logprobs.head import HeadUpdate
from nemo_rl.models.adapters.tensors import LowRankPair
from nemo_rl.utils.errors import ConfigError


@dataclass(frozen=True, eq=False)
class TokenShares:
    """The tokens of each adapter in a microbatch."""

    num_tokens: int
    """Number of tokens that the model computes, with padding."""
    tokens: Sequence[Tensor]
    """For each adapter the indices of its tokens in the flattened tokens of the model, int64."""
    scored: Sequence[Tensor]
    """For each adapter the indices of its tokens among those that are scored, int64."""


@dataclass(frozen=True, eq=False)
class SharedPairs:
    """The matrices that several adapters have for one layer."""

    layer: str
    """Name of the layer."""
    pairs: Sequence[LowRankPair | None]
    """Matrices of each adapter. None if it does not adapt the layer."""
    shares: TokenShares
    """Tokens of each adapter."""

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the output of the layer, `[..., out]`, with the product of each adapter added for its tokens.

        Raises:
            ConfigError: the layer gets other tokens than the model.
        """
        rows = x.flatten(0, -2)
        if len(rows) != self.shares.num_tokens:
            raise ConfigError(
                f"The layer {self.layer} computes {len(rows)} of {self.shares.num_tokens} tokens, so passes of several "
                "adapters cannot share it. Set service.fused_models=1."
            )
        total = out.flatten(0, -2)
        for pair, index in zip(self.pairs, self.shares.tokens, strict=True):
            if pair is not None:
                total = total.index_add(0, index, pair.product(rows.index_select(0, index)))
        return total.view_as(out)

    def of_head(self, hidden_KD: Tensor) -> HeadUpdate:
        """Return the update of an output head.

        The columns of all adapters stand side by side, and are 0 for the tokens of others.
        """
        inner, weights = [], []
        for pair, index in zip(self.pairs, self.shares.scored, strict=True):
            if pair is not None:
                own = pair.inner(hidden_KD.index_select(0, index))
                inner.append(own.new_zeros(len(hidden_KD), own.shape[1]).index_copy(0, index, own))
                weights.append(pair.b.to(hidden_KD.dtype))
        return HeadUpdate(torch.cat(inner, dim=1), torch.cat(weights, dim=1))
