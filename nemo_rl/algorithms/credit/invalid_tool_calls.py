"""Give the turns with a tool call that cannot be made their own advantage."""

from collections.abc import Sequence

from torch import Tensor

from nemo_rl.experience.trajectory import Trajectory


def set_invalid_tool_calls(advantages: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], value: float) -> None:
    """Write an advantage onto the tokens of invalid turns, in place.

    Args:
        advantages: `[B, T]`, as an estimator computed them.
        mask: `[B, T]`, non-zero on tokens that count in the loss.
        trajectories: B samples, whose `invalid_tool_call_turns` are set.
        value: the advantage.
    """
    for row, trajectory in enumerate(trajectories):
        for (start, end), is_invalid in zip(trajectory.turn_spans, trajectory.invalid_tool_call_turns, strict=False):
            if is_invalid:
                counted = mask[row, start:end] != 0
                advantages[row, start:end][counted] = value
