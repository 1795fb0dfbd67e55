"""Render the prompt of a sample again, for a teacher that reads it in another way than the student."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.data.interfaces import Chat, DatumSpec, TokenizerType
from nemo_rl.data.processors import prompt_entry
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import DataError


class Rows(Protocol):
    """The data set of a run, whose rows are prompts."""

    def __getitem__(self, idx: int, /) -> DatumSpec:
        """Return the prompt of a row."""


@dataclass(frozen=True)
class TeacherPrompts:
    """Render prompts of the data with the tokenizer of a teacher."""

    data: Rows
    """Training prompts, by `Trajectory.idx`."""
    tokenizer: TokenizerType
    """Tokenizer of the teacher, with its chat template."""

    def row_of(self, sample: Trajectory) -> DatumSpec:
        """Return the row of the data from which a sample's prompt was rendered.

        Raises:
            DataError: the sample's prompt is not that of its row.
        """
        datum = self.data[sample.idx]
        if not torch.equal(datum["message_log"][0]["token_ids"], prompt_ids(sample)):
            raise DataError(
                f"row {sample.idx}: the prompt of a sample is not that of its row, because an environment or a program "
                "wrote it. Such prompts cannot be rendered again for a teacher; use another environment, or a teacher "
                "that reads the student's tokens (on_policy_distillation.teacher_model_by_agent_name)."
            )
        return datum

    def ids(self, datum: DatumSpec, change: Callable[[Chat], Chat] = lambda chat: chat) -> Tensor:
        """Return the token ids of a row's prompt, `[t]` int64, up to and including the header of the answer.

        Args:
            change: Function that changes the chat.

        Raises:
            DataError: the row does not say what its prompt was rendered from.
        """
        if "chat" not in datum:
            raise DataError(
                f"row {datum['idx']} has no `chat`, so its prompt cannot be rendered for a teacher. Let the data "
                "processor set `chat`, a dict with `messages` and `tools`."
            )
        found: Tensor = prompt_entry(change(datum["chat"]), self.tokenizer)["token_ids"]
        return found


def prompt_ids(sample: Trajectory) -> Tensor:
    """Return the token ids of a sample before its first response, `[t]` int64."""
    ids = [message["token_ids"] for message in sample.message_log if "generation_logprobs" not in message]
    return torch.cat(ids)[: sample.prompt_length] if ids else torch.zeros(0, dtype=torch.int64)


def batch_of(rows: Sequence[Tensor]) -> BatchedDataDict[Any]:
    """Return a batch that a model can score, from the token ids `[t]` int64 of each row."""
    return BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
        input_lengths=torch.tensor([len(row) for row in rows]),
    )
