"""Convert an answer that consists of steps to token ids, for process reward models.

The tokens are those of the rendered prompt with the header of the answer, followed by those of each step with the
separator after it. Each step is encoded separately, so its last token is the last one of its separator. This is the
form of TRL's data sets of stepwise supervision, with a chat template. Invariant: an answer has the same tokens in
training and in the environment, and the tokens of a step do not depend on later steps.

One padding token follows the last step, because the score after a token belongs to the place of the next token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from nemo_rl.data.interfaces import (
    LabelledStepsDatumSpec,
    LLMMessageLogType,
    Message,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.conversations import finished_datum, with_task_prompts
from nemo_rl.data.messages.coverage import RenderedChat
from nemo_rl.data.messages.encoding import encode_continuation, encode_text, render_chat, with_bos
from nemo_rl.data.messages.spans import ASSISTANT
from nemo_rl.data.messages.template_form import tools_of
from nemo_rl.utils.errors import DataError


def split_steps(answer: str, separator: str) -> list[str]:
    r"""Return the steps of an answer. Parts without text are left out.

    Example:
        >>> split_steps("7+5=12\n\n30+80=110\n", "\n")
        ['7+5=12', '30+80=110']
    """
    return [step for step in answer.split(separator) if step.strip()]


def ends_of_step_texts(answer: str, separator: str) -> list[int]:
    r"""Return the position after each step of `split_steps` and its separator. The last step ends with the answer.

    Example:
        >>> ends_of_step_texts("7+5=12\n\n30+80=110\n", "\n")
        [7, 18]
    """
    parts = answer.split(separator)
    after = accumulate(len(part) + len(separator) for part in parts)
    ends = [end for part, end in zip(parts, after, strict=True) if part.strip()]
    return [*ends[:-1], len(answer)] if ends else []


def num_tokens_until(ends: Sequence[int], token_ids: Sequence[int], tokenizer: TokenizerType) -> list[int]:
    """Return the number of tokens up to each position of their text, including the token that spans the position.

    Args:
        ends: Positions in the text of the tokens without special tokens, in increasing order.
        token_ids: Tokens of one turn.
        tokenizer: A fast tokenizer.
    """
    stream, num_characters = DecodeStream(skip_special_tokens=True), 0
    lengths = []
    for token in token_ids:
        num_characters += len(stream.step(tokenizer.backend_tokenizer, token) or "")
        lengths.append(num_characters)
    return [min(bisect_left(lengths, end) + 1, len(lengths)) for end in ends]


@dataclass(frozen=True)
class StepForm:
    """The form in which a process reward model reads answers."""

    tokenizer: TokenizerType
    """Tokenizer with a padding token."""
    separator: str
    """Text after each step."""
    rules: TextRules
    """Rules that choose texts to encode as ordinary text."""
    longest: int | None = None
    """Argument of `encode_text`."""

    def log(
        self, prompt: Sequence[Message], steps: Sequence[str], tools: list[dict[str, Any]] | None = None
    ) -> LLMMessageLogType:
        """Return the entries of a message log: the prompt, each step, and the padding token.

        Args:
            prompt: Messages before the answer.
            steps: Texts of the steps.
            tools: Function schemas that the chat offers.

        Raises:
            DataError: There are no steps, or the chat template refuses the prompt.
        """
        if not steps:
            raise DataError("the answer has no steps")
        tokenizer, control = self.tokenizer, control_tokens_of(self.tokenizer)
        messages, tools = control.quoted_chat(prompt, self.rules), control.quoted_tools(tools, self.rules)
        text = with_bos(render_chat(messages, tokenizer, add_generation_prompt=True, tools=tools), tokenizer)
        ids = encode_text(text, tokenizer, self.longest)
        log: LLMMessageLogType = [{"role": "user", "content": control.shown(text), "token_ids": ids}]
        for step in steps:
            written = {"role": ASSISTANT, "content": step + self.separator}
            (quoted,) = control.quoted_chat([written], self.rules)
            log.append({**written, "token_ids": encode_continuation(quoted["content"], tokenizer, self.longest)})
        log.append({"role": ASSISTANT, "content": "", "token_ids": torch.tensor([tokenizer.pad_token_id])})
        return log


def ends_of_steps(log: LLMMessageLogType) -> Tensor:
    """Return the index of the token after each step of a log of `StepForm.log`, [steps] int64."""
    lengths = torch.tensor([len(entry["token_ids"]) for entry in log[:-1]])
    return lengths.cumsum(0)[1:]


def labelled_steps_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    separator: str,
) -> LabelledStepsDatumSpec:
    """Return the conversation of a row's `labelled_steps` (prompt and steps), with the labels of the steps.

    Args:
        separator: Text after each step.
    """
    row = datum_dict["labelled_steps"]
    prompt = with_task_prompts(row["prompt"], task_data_spec)
    form = StepForm(tokenizer, separator, task_data_spec.rules, max_seq_length)
    tools = tools_of(row)
    log = form.log(prompt, row["steps"], tools)
    rendered = RenderedChat(prompt, tools, log[0]["content"], tokenizer)
    rendered.check(task_data_spec.may_leave_out, task=task_data_spec.task_name)
    ends = ends_of_steps(log).tolist()
    datum = finished_datum(log, None, datum_dict.get("task_name"), max_seq_length, idx)
    return LabelledStepsDatumSpec(**datum, step_ends=ends, step_labels=row["labels"])
