"""Concatenate the rows of each sample, so that an advantage estimator gets each sample once.

    rows       [r0 of sample 0] [r1 of sample 0] [r0 of sample 1]        R rows, T tokens of the longest
    join   ─►  [r0 r1 of sample 0] [r0 of sample 1]                      B samples, T' tokens of the longest
    cut    ─►  the values of the rows again

A group of G samples then has G rewards, even if samples have several rows. A computation over the tokens of a sample
covers the tokens of all of its conversations, in the order of the rows. Invariant: `cut(join(x))` is `x` on the tokens
of the rows. Without branches, `join` and `cut` return their argument.

Legend: `R` rows, `B` samples, `T` tokens of the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from nemo_rl.experience.trajectory import Trajectory


@dataclass(frozen=True)
class JoinedRows:
    """The rows of samples as one sequence for each sample."""

    num_rows_B: Tensor
    """`[B]` int64, number of rows of each sample."""
    lengths_R: Tensor
    """`[R]` int64, number of tokens of each row."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], lengths_R: Tensor) -> Self:
        """Return the layout of a training batch.

        Args:
            trajectories: B samples.
            lengths_R: `[R]` int64, number of tokens of each row of the batch.

        Raises:
            ValueError: The number of rows of the batch differs from the number of conversations of the samples.
        """
        num_rows_B = torch.tensor([1 + len(trajectory.branches) for trajectory in trajectories])
        if int(num_rows_B.sum()) != len(lengths_R):
            raise ValueError(
                f"The {len(trajectories)} samples have {int(num_rows_B.sum())} conversations, but the batch has "
                f"{len(lengths_R)} rows."
            )
        return cls(num_rows_B, lengths_R)

    def join(self, values_RT: Tensor) -> Tensor:
        """Return values of the tokens of rows as values of the tokens of samples, `[B, T']`, 0 after the last."""
        if self._is_same:
            return values_RT
        joined = values_RT.new_zeros(len(self.num_rows_B) * self._width)
        kept_RT = self._kept(values_RT.shape[1])
        joined[self._places(values_RT.shape[1])[kept_RT]] = values_RT[kept_RT]
        return joined.view(-1, self._width)

    def cut(self, values_BT: Tensor) -> Tensor:
        """Return values of the tokens of samples as values of the tokens of rows, `[R, T]`, with 0 on padding."""
        if self._is_same:
            return values_BT
        width = int(self.lengths_R.max())
        kept_RT = self._kept(width)
        values_RT = values_BT.new_zeros(kept_RT.shape)
        values_RT[kept_RT] = values_BT.reshape(-1)[self._places(width)[kept_RT]]
        return values_RT

    def repeat(self, values_B: Tensor) -> Tensor:
        """Return the value of each row's sample, `[R]`."""
        return values_B if self._is_same else values_B.repeat_interleave(self.num_rows_B)

    def largest(self, values_R: Tensor) -> Tensor:
        """Return the largest value of the rows of each sample, `[B]`."""
        if self._is_same:
            return values_R
        return torch.stack([values.max() for values in values_R.split(self.num_rows_B.tolist())])

    def last(self, values_R: Tensor) -> Tensor:
        """Return the value of the last row of each sample, `[B]`."""
        return values_R if self._is_same else values_R[self.num_rows_B.cumsum(0) - 1]

    @cached_property
    def _is_same(self) -> bool:
        """True if each sample is one row."""
        return len(self.num_rows_B) == len(self.lengths_R)

    @cached_property
    def _sample_of_R(self) -> Tensor:
        return torch.arange(len(self.num_rows_B)).repeat_interleave(self.num_rows_B)

    @cached_property
    def _length_B(self) -> Tensor:
        return torch.zeros_like(self.num_rows_B).index_add_(0, self._sample_of_R, self.lengths_R)

    @property
    def _width(self) -> int:
        return int(self._length_B.max())

    def _kept(self, width: int) -> Tensor:
        """Return a `[R, T]` bool mask that is True on the tokens of rows and False on padding."""
        return torch.arange(width)[None] < self.lengths_R[:, None]

    def _places(self, width: int) -> Tensor:
        """Return the index of each token of a row in the flattened tokens of all samples, `[R, T]`."""
        before_R = self.lengths_R.cumsum(0) - self.lengths_R  # tokens of all rows before it
        before_B = self._length_B.cumsum(0) - self._length_B  # tokens of all samples before it
        start_R = self._sample_of_R * self._width + before_R - before_B[self._sample_of_R]
        return start_R[:, None] + torch.arange(width)[None]
