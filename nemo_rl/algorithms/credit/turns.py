"""Compute an advantage for each response turn of a sample, from the rewards of its turns.

    turn_returns    the discounted return of a turn, `R_n = sum over m >= n of discount^(m - n) * r_m`, compared with
                    the returns of the group at the same turn: the step-level advantage of GiGPO (arXiv 2505.10978),
                    `(R - mean(R)) / std(R)`, with the number of the turn in place of the state
    turn_rewards    the reward of each turn compared with the rewards of the group at the same turn, `a_m = (r_m -
                    mean(r)) / std(r)`; a turn gets `sum over m >= n of discount^(m - n) * a_m`: MT-GRPO (arXiv
                    2505.11821), whose first turn gets its own result plus that of the outcome, for any number of turns
    step_rewards    as turn_rewards, for steps in place of turns, and compared with the rewards of all steps of the
                    group: process supervision with GRPO (arXiv 2402.03300, section 4.1.3)

All compare by `group_statistics.group_advantage`, whose arguments say whether the baseline includes the sample itself
and whether the difference is divided by the deviation. Invariant: only turns that a sample has enter a statistic, so a
group's later turns are compared among the samples that reached them.

Legend: `B` samples, `T` tokens, `N` response turns (or steps) of the sample with the most of them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nemo_rl.algorithms.credit.group_statistics import EQUAL_SPREAD, group_advantage
from nemo_rl.experience.trajectory import Trajectory

type TurnCredit = Literal["turn_returns", "turn_rewards", "step_rewards"]


def turn_advantage(
    turn_rewards_BN: Tensor,
    has_turn_BN: Tensor,
    group_ids_B: Tensor,
    *,
    credit: TurnCredit,
    discount: float,
    leave_one_out: bool,
    normalize: bool,
    std_over_batch: bool = False,
) -> Tensor:
    """Return the advantage of each turn, `[B, N]` float64, 0 where a sample has no such turn.

    Args:
        turn_rewards_BN: `[B, N]` float.
        has_turn_BN: `[B, N]` bool, False also for all turns of samples that are left out of all statistics.
        group_ids_B: `[B]` int64; rows with equal ids are answers to one prompt.
        credit: Which formula of this module is used.
        discount: Factor for each turn between a reward and the turn that gets it, from 0 to 1.
        leave_one_out: As in `group_advantage`.
        normalize: As in `group_advantage`.
        std_over_batch: As in `group_advantage`. The deviation is then over all turns of the batch.
    """
    rewards_BN = torch.where(has_turn_BN, turn_rewards_BN.double(), 0.0)
    compared_BN, magnitudes_BN = rewards_BN, rewards_BN.abs()
    if credit == "turn_returns":
        compared_BN, magnitudes_BN = _discounted_sums(rewards_BN, discount), _discounted_sums(magnitudes_BN, discount)
    num_turns = rewards_BN.shape[1]
    alike_BN = group_ids_B[:, None].expand(-1, num_turns)
    if credit != "step_rewards":
        alike_BN = torch.unique(group_ids_B, return_inverse=True)[1][:, None] * num_turns + torch.arange(num_turns)
    advantage_BN = group_advantage(
        compared_BN.flatten(),
        alike_BN.flatten(),
        has_turn_BN.flatten(),
        leave_one_out=leave_one_out,
        normalize=normalize,
        std_over_batch=std_over_batch,
        magnitudes_B=magnitudes_BN.flatten(),
    ).view_as(rewards_BN)
    if credit != "turn_returns":
        advantage_BN = _discounted_sums(advantage_BN, discount)
    return torch.where(has_turn_BN, advantage_BN, 0.0)


def with_total(turn_rewards_BN: Tensor, has_turn_BN: Tensor, rewards_B: Tensor) -> Tensor:
    """Return turn rewards that sum to `rewards_B [B]`. The last turn gets the difference, such as a length penalty.

    A difference that can come from the rounding of float32 is treated as 0.
    """
    turn_rewards_BN = torch.where(has_turn_BN, turn_rewards_BN.double(), 0.0)
    missing_B = rewards_B.double() - turn_rewards_BN.sum(1)
    is_noise_B = missing_B.abs() <= EQUAL_SPREAD * turn_rewards_BN.abs().amax(1)
    missing_B = torch.where(is_noise_B, 0.0, missing_B)
    is_last_BN = has_turn_BN & ~torch.cat([has_turn_BN[:, 1:], torch.zeros_like(has_turn_BN[:, :1])], dim=1)
    return turn_rewards_BN + is_last_BN * missing_B[:, None]


def per_token_of_turns(advantage_BN: Tensor, turn_spans: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the advantage of each token's turn for all tokens that count, `[B, T]`.

    Args:
        turn_spans: `[B, N, 2]` int64, first token and end of each turn. Both are 0 after the last turn of a sample.
        mask: `[B, T]`, non-zero on tokens that count, all of them within turns.
    """
    starts_BN, ends_BN = turn_spans.unbind(-1)
    num_begun_BT = torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=torch.int64)
    num_begun_BT.scatter_add_(1, starts_BN, (ends_BN > 0).long())
    turn_BT = (num_begun_BT.cumsum(1)[:, :-1] - 1).clamp(min=0)
    return torch.where(mask != 0, advantage_BN.gather(1, turn_BT).to(dtype), 0.0)


def last_token_of_turns(turn_spans: Tensor, mask: Tensor) -> Tensor:
    """Return the index of the last token of each turn among the sample's tokens that count, `[B, N]` int64.

    The index is -1 for a turn without a token that counts, and after the last turn of a sample.

    Args:
        turn_spans: `[B, N, 2]` int64, first token and end of each turn. Both are 0 after the last turn of a sample.
        mask: `[B, T]`, non-zero on tokens that count.

    Example:
        >>> last_token_of_turns(torch.tensor([[[1, 3], [4, 5]]]), torch.tensor([[0, 1, 1, 0, 1]]))
        tensor([[1, 2]])
    """
    before_BT = torch.nn.functional.pad((mask != 0).long().cumsum(1), (1, 0))
    starts_BN, ends_BN = turn_spans.unbind(-1)
    num_BN = before_BT.gather(1, ends_BN)
    return torch.where(num_BN > before_BT.gather(1, starts_BN), num_BN - 1, -1)


def padded(rows: Sequence[Sequence[Any]], filler: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor `[B, N, ...]` of B rows, each padded with `filler` to the N values of the longest row.

    All rows are converted in one call, because one call for each row takes most of the stage's time in large batches.

    Example:
        >>> padded([[1.0], [2.0, 3.0]], 0.0, torch.float32)
        tensor([[1., 0.],
                [2., 3.]])
    """
    longest = max(len(row) for row in rows)
    values = torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=dtype)
    return values.reshape(len(rows), longest, *np.shape(filler))


def padded_rewards(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return spans `[B, N, 2]` int64 and rewards `[B, N]` float64 of all steps, and of turns without steps."""
    parts = [trajectory.rewarded_spans for trajectory in trajectories]
    spans = padded([[span for span, _ in own] for own in parts], (0, 0), torch.int64)
    return spans, padded([[reward for _, reward in own] for own in parts], 0.0, torch.float64)


def _discounted_sums(values_BN: Tensor, discount: float) -> Tensor:
    """Return the discounted sum of each turn's value and all later values, with the factor `discount` per turn.

    Example:
        >>> _discounted_sums(torch.tensor([[1.0, 0.0, 4.0]]), 0.5)
        tensor([[2., 2., 4.]])
    """
    sums_BN = values_BN.clone()
    for turn in reversed(range(sums_BN.shape[1] - 1)):
        sums_BN[:, turn] += discount * sums_BN[:, turn + 1]
    return sums_BN


def set_invalid_tool_calls(advantages: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], value: float) -> None:
    """Set the advantage of the tokens of turns with a tool call that cannot be made, in place.

    Args:
        advantages: `[B, T]`, as an estimator computed them.
        mask: `[B, T]`, non-zero on tokens that count in the loss.
        trajectories: B samples, whose `invalid_tool_call_turns` are set.
    """
    for row, trajectory in enumerate(trajectories):
        for span, is_invalid in zip(trajectory.turn_spans, trajectory.invalid_tool_call_turns, strict=False):
            if is_invalid:
                _set(advantages[row], mask[row], span, value)


def set_malformed_thinking(advantages: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], value: float) -> None:
    """Set the advantage of the tokens of misplaced thinking tags, in place.

    Args:
        advantages: `[B, T]`, as an estimator computed them.
        mask: `[B, T]`, non-zero on tokens that count in the loss.
        trajectories: B samples, whose `malformed_thinking` is set.
    """
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.malformed_thinking:
            _set(advantages[row], mask[row], span, value)


def _set(advantages_T: Tensor, mask_T: Tensor, span: tuple[int, int], value: float) -> None:
    start, end = span
    advantages_T[start:end][mask_T[start:end] != 0] = value
