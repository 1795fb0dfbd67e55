"""The conversations of a sample besides its first one, and what all conversations have in common.

A program that edits or summarizes its history, runs sub-agents or samples in parallel makes calls of the model that do
not continue each other. Each chain of calls is a conversation, of which `rows.rows_of` makes a row of the training
batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from nemo_rl.data.common_prefixes import Path
from nemo_rl.data.interfaces import Message
from nemo_rl.models.batch_rows import PackedRows
from nemo_rl.models.generation.interfaces import VersionSpan

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class StoredTokens:
    """The place of a conversation's tokens and texts if it holds only their numbers (see `runners.stored`)."""

    path: Path
    """Place of the row in the tree of the rows there."""
    index: int
    """Its place among the rows."""
    rows: "ObjectRef[PackedRows] | None" = None
    """Reference of the tokens and texts of its group; None before the driver has it."""


@dataclass
class Branch:
    """A further conversation of a sample.

    Each sampled token is trained once: a message that an earlier conversation of the sample trains is here without
    `generation_logprobs`.
    """

    message_log: list[Message]
    """As `Trajectory.message_log`."""
    prompt_length: int
    """Tokens before the first response that has `generation_logprobs`."""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """As `Trajectory.weight_versions`; spans start at positions of this conversation."""
    trains: bool = True
    """False leaves the conversation out of the loss."""
    stored: StoredTokens | None = None
    """As `Trajectory.stored`."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        return {
            "message_log": messages_state(self.message_log),
            "prompt_length": self.prompt_length,
            "weight_versions": [list(span) for span in self.weight_versions],
            "trains": self.trains,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a conversation from its `state_dict`."""
        return cls(**{**state, "weight_versions": [VersionSpan(*span) for span in state["weight_versions"]]})


def messages_state(log: Sequence[Message]) -> list[Message]:
    """Return a copy of messages for a checkpoint, which later changes of their tensors do not reach."""
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
    """Return the number of tokens that the policy wrote, as its server has counted them where only that knows."""
    total = 0
    for message in log:
        if "generation_logprobs" in message:
            total += message.get("num_tokens") or message["token_ids"].numel()
    return total


def spans_of_turns(log: Sequence[Message], start: int = 0) -> list[tuple[int, int]]:
    """Return first token and end of each response turn.

    Args:
        log: the messages of one conversation.
        start: position of its first token.
    """
    spans = []
    for message in log:
        end = start + message["token_ids"].numel()
        if "generation_logprobs" in message:
            spans.append((start, end))
        start = end
    return spans
