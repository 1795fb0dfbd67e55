"""Turn finished conversations into the tokens that a reward model reads.

A conversation has the same tokens as in the training of reward models (`preference_preprocessor`), or exactly those
that its chat template writes. Invariant: no text of it, whoever wrote it, becomes a control token: an answer cannot end
its own turn and write another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_rl.data.interfaces import Message, TaskDataSpec, TokenizerType
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.conversations import get_formatted_message_log
from nemo_rl.data.messages.encoding import encode_text, render_chat, with_bos
from nemo_rl.data.messages.observations import template_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError

_SPEC = TaskDataSpec("reward_model", text_rules=TextRules(rows=True, tools=True))


@dataclass(frozen=True)
class ConversationTokens:
    """Tokenises conversations with the chat template of a reward model."""

    tokenizer: TokenizerType
    """Tokenizer of the reward model."""
    longest: int
    """Most tokens that it reads."""
    too_long: Literal["error", "keep_end"] = "error"
    """Whether a longer conversation is an error, or only its last tokens count."""
    ends_with_turn: bool = True
    """Whether text that the template writes after the last turn is left out, as in training."""

    def of(self, messages: Sequence[Message]) -> Tensor:
        """Return the tokens of a conversation, [T] int64.

        The role "environment" is rendered as "user".

        Args:
            messages: `role` and `content`, the answer last.

        Raises:
            DataError: the conversation is too long, the template refuses it, or a part is not text.
        """
        known = [template_message(message) for message in messages]
        ids = self._as_trained(known) if self.ends_with_turn else self._as_rendered(known)
        if len(ids) <= self.longest:
            return ids
        if self.too_long == "keep_end":
            return ids[-self.longest :]
        raise DataError(
            f"the conversation has {len(ids)} tokens for the reward model, which reads {self.longest}. Raise "
            "env.reward_model.max_model_len, or set env.reward_model.too_long=keep_end"
        )

    def _as_trained(self, messages: list[Message]) -> Tensor:
        log = get_formatted_message_log(messages, self.tokenizer, _SPEC, add_generation_prompt=True)
        return torch.cat([message["token_ids"] for message in log])

    def _as_rendered(self, messages: list[Message]) -> Tensor:
        quoted = control_tokens_of(self.tokenizer).quoted_chat(messages, _SPEC.rules)
        text = render_chat(quoted, self.tokenizer, add_generation_prompt=False)
        return encode_text(with_bos(text, self.tokenizer), self.tokenizer)


def padded(rows: Sequence[Tensor], pad_token_id: int) -> BatchedDataDict[Any]:
    """Return `input_ids` [B, T] and `input_lengths` [B], int64, of B rows of tokens, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_token_id)
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows])})
