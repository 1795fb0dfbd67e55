"""Generalised advantage estimation over the tokens of samples: pure functions of rewards and values.

    delta_k = r_k + gamma V(s_k+1) - V(s_k)
    A_k     = sum over l >= 0 of (gamma lambda)^l delta_k+l            arXiv 1506.02438, equation 16

The tokens of a sample are those that count, in their order: a prompt, an observation or padding is no step, so the
state after the last token of a turn is the one before the first token of the next turn. Invariant: everything is
computed in float64, and a result is 0 where a token does not count.

Legend: `B` samples, `T` tokens of a row, `N` tokens that count of the sample with most.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of samples that count, moved to the left."""

    shape: tuple[int, int]
    """`B`, `T`."""
    order_BN: Tensor
    """Place in the row of each of them."""
    exists_BN: Tensor
    """False after the last one of a sample."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> Self:
        """Find the tokens whose mask is not 0."""
        counted_BT = mask_BT != 0
        most = int(counted_BT.sum(1).max()) if counted_BT.numel() else 0
        order_BN = counted_BT.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls((mask_BT.shape[0], mask_BT.shape[1]), order_BN, counted_BT.gather(1, order_BN))

    @property
    def lengths_B(self) -> Tensor:
        """The number of tokens of each sample, int64."""
        return self.exists_BN.sum(1)

    @property
    def is_last_BN(self) -> Tensor:
        """True on the last token of each sample."""
        after_BN = torch.nn.functional.pad(self.exists_BN[:, 1:], (0, 1), value=False)
        return self.exists_BN & ~after_BN

    def take(self, values_BT: Tensor) -> Tensor:
        """Return values of tokens of rows as `[B, N]` float64, 0 after the last token."""
        return torch.where(self.exists_BN, values_BT.gather(1, self.order_BN).double(), 0.0)

    def put(self, values_BN: Tensor) -> Tensor:
        """Return values of these tokens at their places in the rows, `[B, T]`, 0 elsewhere."""
        kept_BN = torch.where(self.exists_BN, values_BN, 0.0)
        return kept_BN.new_zeros(self.shape).scatter_(1, self.order_BN, kept_BN)


def gae(
    tokens: CountedTokens, rewards_BN: Tensor, values_BN: Tensor, *, after_B: Tensor, gamma: float, lambda_B: Tensor
) -> Tensor:
    """Return the advantage of each token, `[B, N]` float64.

    Args:
        tokens: which of the N tokens a sample has.
        rewards_BN: reward of each token, from `tokens.take`.
        values_BN: value of the state before each token, from `tokens.take`.
        after_B: value of the state after the last token of each sample; 0 for a finished answer.
        gamma: discount for each token.
        lambda_B: lambda of each sample.

    Example:
        >>> tokens = CountedTokens.of(torch.ones(1, 2))
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> gae(tokens, rewards, values, after_B=torch.zeros(1), gamma=1.0, lambda_B=torch.tensor([0.5]))
        tensor([[0.2500, 0.5000]], dtype=torch.float64)
    """
    next_BN = torch.nn.functional.pad(values_BN[:, 1:].double(), (0, 1))
    next_BN = torch.where(tokens.is_last_BN, after_B.double()[:, None], next_BN)
    # A loop over tokens; numpy, because each of its operations on a few numbers is several times faster than torch's.
    deltas_NB = np.ascontiguousarray((rewards_BN.double() + gamma * next_BN - values_BN.double()).T.numpy())
    decay_B, sums_B = gamma * lambda_B.double().numpy(), np.zeros(deltas_NB.shape[1])
    for token in reversed(range(len(deltas_NB))):
        sums_B = deltas_NB[token] + decay_B * sums_B
        deltas_NB[token] = sums_B
    return torch.from_numpy(deltas_NB).T


def length_adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """Return `1 - 1 / (alpha * length)` of each sample, at least 0: VAPO, arXiv 2504.05118, section 4.1.

    Example:
        >>> length_adaptive_lambda(torch.tensor([100, 10]), 0.05)
        tensor([0.8000, 0.0000], dtype=torch.float64)
    """
    return (1 - 1 / (alpha * lengths_B.double().clamp(min=1))).clamp(min=0)
