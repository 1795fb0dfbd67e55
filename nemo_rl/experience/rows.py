"""Make the rows of the training batch, one for each conversation of each sample.

Invariant: the rows of a sample follow each other, in the order of its conversations. A sample without branches is used
as its row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import batched

from nemo_rl.experience.branches import Branch, num_tokens, num_written_tokens
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import DataError


def rows_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the rows of samples. Trajectories that are rows already are returned unchanged.

    A row of a sample with branches is a view of the sample that has only one conversation. Positions and token counts
    of a row belong to its conversation. The reward and all fields about turns (`turn_rewards`, `penalties`,
    `invalid_tool_call_turns`, `num_turns`) belong to the whole sample. A conversation that does not train, or in which
    the policy wrote no token, has a `loss_multiplier` of 0, so that it is not a sequence of the loss.

    Args:
        trajectories: Samples, or rows.
    """
    return [row for trajectory in trajectories for row in (_views(trajectory) if trajectory.branches else [trajectory])]


def _views(sample: Trajectory) -> Iterator[Trajectory]:
    own = Branch(
        sample.message_log,
        sample.prompt_length,
        sample.weight_versions,
        stored=sample.stored,
        row_inputs=sample.row_inputs,
    )
    start = 0
    for number, conversation in enumerate((own, *sample.branches)):
        end = start + num_tokens(conversation.message_log)
        trains = conversation.trains and num_written_tokens(conversation.message_log) > 0
        yield replace(
            sample,
            message_log=conversation.message_log,
            prompt_length=conversation.prompt_length,
            weight_versions=conversation.weight_versions,
            loss_multiplier=sample.loss_multiplier if trains else 0.0,
            malformed_thinking=_within(sample, start, end),
            stored=conversation.stored,
            chat=None if number else sample.chat,
            row_inputs=conversation.row_inputs,
            branches=[],
            branch=number,
        )
        start = end


def _within(sample: Trajectory, start: int, end: int) -> list[tuple[int, int]]:
    """Return the malformed tags of one conversation, as positions in the conversation."""
    return [(first - start, last - start) for first, last in sample.malformed_thinking if start <= first < end]


def rows_per_update(
    trajectories: Sequence[Trajectory], samples_per_update: int, model: str = "policy"
) -> list[int] | None:
    """Return the number of rows of each optimizer update, so that all updates have the same number of samples.

    Args:
        trajectories: Samples of a step.
        model: Section of the model that is trained, for errors.

    Returns:
        The number of rows of each update. None if each sample is one row.

    Raises:
        DataError: The samples do not divide into updates.
    """
    if not any(trajectory.branches for trajectory in trajectories):
        return None
    if len(trajectories) % samples_per_update:
        raise DataError(
            f"{len(trajectories)} samples do not divide into optimizer updates of {samples_per_update} samples each "
            f"({model}.train_global_batch_size)."
        )
    counts = [1 + len(trajectory.branches) for trajectory in trajectories]
    return [sum(of_update) for of_update in batched(counts, samples_per_update)]
