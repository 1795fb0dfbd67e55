"""Define the conversations of a sample after its first one, and functions for messages of conversations.

A program that edits or summarizes its history, runs sub-agents or samples in parallel makes model calls that do not
continue each other. Each chain of calls is a conversation. `rows.rows_of` makes one row of the training batch from each
conversation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from nemo_rl.data.common_prefixes import Path
from nemo_rl.data.images.rows import from_state
from nemo_rl.data.interfaces import Message, RowInputs
from nemo_rl.models.batch_rows import PackedRows
from nemo_rl.models.generation.interfaces import VersionSpan

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class StoredTokens:
    """Location of the tokens and texts of a conversation that holds only token counts (`runners.stored`)."""

    path: Path
    """Path of the conversation's row in the stored nested rows."""
    index: int
    """Index of the row among the stored rows."""
    rows: "ObjectRef[PackedRows] | None" = None
    """Reference of the tokens and texts of the conversation's group. None until the driver has it."""


@dataclass
class Branch:
    """A further conversation of a sample.

    Each sampled token is trained once. If an earlier conversation of the sample trains a message, the message has no
    `generation_logprobs` in this conversation.
    """

    message_log: list[Message]
    """Messages of the conversation, as in `Trajectory.message_log`."""
    prompt_length: int
    """Number of tokens before the first response that has `generation_logprobs`."""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Versions of the weights, as in `Trajectory.weight_versions`. Spans start at positions of this conversation."""
    trains: bool = True
    """False excludes the conversation from the loss."""
    stored: StoredTokens | None = None
    """Location of the tokens, as in `Trajectory.stored`."""
    row_inputs: RowInputs | None = None
    """Inputs of the model besides the tokens, as in `Trajectory.row_inputs`."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        return {
            "message_log": messages_state(self.message_log),
            "prompt_length": self.prompt_length,
            "weight_versions": [list(span) for span in self.weight_versions],
            "trains": self.trains,
            "row_inputs": None if self.row_inputs is None else self.row_inputs.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a conversation from its `state_dict`."""
        stored = state.get("row_inputs")
        rebuilt = {
            "weight_versions": [VersionSpan(*span) for span in state["weight_versions"]],
            "row_inputs": None if stored is None else from_state(stored),
        }
        return cls(**{**state, **rebuilt})


def messages_state(log: Sequence[Message]) -> list[Message]:
    """Return a copy of messages for a checkpoint. Later changes of the messages' tensors do not change the copy."""
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in message.items()}
        for message in log
    ]


def num_tokens(log: Sequence[Message]) -> int:
    """Return the number of tokens of messages."""
    total = 0  # a loop takes half the time of a sum over a generator, for each sample of a step
    for message in log:
        total += message["token_ids"].numel()
    return total


def num_written_tokens(log: Sequence[Message]) -> int:
    """Return the number of tokens that the policy wrote, as counted by its server if the tokens are not known here."""
    total = 0
    for message in log:
        if "generation_logprobs" in message:
            total += message.get("num_tokens") or message["token_ids"].numel()
    return total


def spans_of_turns(log: Sequence[Message], start: int = 0) -> list[tuple[int, int]]:
    """Return the positions of each response turn's first token and end.

    Args:
        log: The messages of one conversation.
        start: Position of the conversation's first token.
    """
    spans = []
    for message in log:
        end = start + message["token_ids"].numel()
        if "generation_logprobs" in message:
            spans.append((start, end))
        start = end
    return spans
