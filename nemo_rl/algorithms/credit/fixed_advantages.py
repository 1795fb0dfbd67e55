"""Give tokens of a turn in which something is wrong a fixed advantage instead of the computed one."""

from collections.abc import Sequence

from torch import Tensor

from nemo_rl.experience.trajectory import Trajectory


def set_invalid_tool_calls(advantages: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], value: float) -> None:
    """Write an advantage onto the tokens of turns with a tool call that cannot be made, in place.

    Args:
        advantages: `[B, T]`, as an estimator computed them.
        mask: `[B, T]`, non-zero on tokens that count in the loss.
        trajectories: B samples, whose `invalid_tool_call_turns` are set.
        value: the advantage.
    """
    for row, trajectory in enumerate(trajectories):
        for span, is_invalid in zip(trajectory.turn_spans, trajectory.invalid_tool_call_turns, strict=False):
            if is_invalid:
                _set(advantages[row], mask[row], span, value)


def set_malformed_thinking(advantages: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], value: float) -> None:
    """Write an advantage onto the tokens of thinking tags that are out of place, in place.

    Args:
        advantages: `[B, T]`, as an estimator computed them.
        mask: `[B, T]`, non-zero on tokens that count in the loss.
        trajectories: B samples, whose `malformed_thinking` is set.
        value: the advantage.
    """
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.malformed_thinking:
            _set(advantages[row], mask[row], span, value)


def _set(advantages_T: Tensor, mask_T: Tensor, span: tuple[int, int], value: float) -> None:
    start, end = span
    advantages_T[start:end][mask_T[start:end] != 0] = value
