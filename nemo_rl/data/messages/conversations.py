"""Turns whole conversations into token ids for supervised training, message by message.

The processors at the end make data of rows: conversations, pairs of them, labelled ones. Each message gets the span of
the rendered chat that belongs to it.

Invariant: the spans cover the rendered chat without gap or overlap, and the span of an assistant turn is exactly the
text that a model would have to sample: from the end of the generation prompt to the token that ends the turn. A
conversation that is too long becomes a short stub with `loss_multiplier` 0 and is never trained on.

Spans are found by two methods, tried in order:

1. Prefixes. The chat up to a message, rendered alone, is the beginning of the whole chat. This is exact.
2. Markers, for templates that render a turn differently once later ones follow (Qwen3 leaves `<think>` out
   of earlier turns). The text that opens an assistant turn and the token that closes it are searched in the
   rendered chat; if their number or their content does not fit the messages, the chat is refused.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from nemo_rl.data.interfaces import (
    DatumSpec,
    FeedbackDatumSpec,
    LLMMessageLogType,
    Message,
    PreferenceDatumSpec,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.content import content_text, with_texts
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.rendering import encode_text, render_chat
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.utils.errors import DataError

ASSISTANT = "assistant"
TENSOR_KEYS = ("token_ids", "generation_logprobs", "token_loss_mask")
STUB_TOKENS = 4
"""Most tokens, and characters of text, kept of each message of a prompt that is too long."""


@dataclass(frozen=True)
class ChatRenderer:
    """Renders the beginnings of one conversation.

    Attributes:
        messages: the whole conversation.
        tokenizer: tokenizer whose chat template is used.
        tools: tool descriptions, or None.
    """

    messages: Sequence[Message]
    tokenizer: TokenizerType
    tools: list[dict[str, Any]] | None = None

    def text(self, count: int, *, opened: bool = False) -> str:
        """Render the first `count` messages; `opened` adds the header of an assistant turn."""
        if count == 0 and not opened:
            return ""
        return render_chat(self.messages[:count], self.tokenizer, add_generation_prompt=opened, tools=self.tools)


def message_ends(chat: ChatRenderer, full_text: str, *, header_is_prompt: bool) -> list[int]:
    """Return the end of each message's text in `full_text`; a message begins where the one before it ends.

    The header of an assistant turn belongs to the message before it if `header_is_prompt`. White space
    after the token that closes an assistant turn belongs to the next message: no model samples it.

    Args:
        chat: the conversation.
        full_text: `chat` rendered as a whole.
        header_is_prompt: whether headers are left out of assistant turns.

    Raises:
        DataError: the template rewrites earlier turns so that their spans cannot be found.
    """
    ends: list[int] = []
    for position, message in enumerate(chat.messages):
        start = ends[-1] if ends else 0
        if position == len(chat.messages) - 1:
            end = len(full_text)
        elif message["role"] == ASSISTANT:
            end = _turn_end(chat, full_text, position, start)
        elif chat.messages[position + 1]["role"] == ASSISTANT:
            end = _turn_start(chat, full_text, position + 1, start, header_is_prompt)
        else:
            end = _prefix_end(chat, full_text, position, start)
        ends.append(end)
    _check_contents(chat, full_text, ends)
    return ends


def _prefix_end(chat: ChatRenderer, full_text: str, position: int, start: int) -> int:
    """Return the end of a message that another prompt message follows; if both share a turn, the latter gets it all."""
    try:
        text = chat.text(position + 1)
    except DataError:  # the template wants a user message before the chat may end
        return start
    return len(text) if full_text.startswith(text) and len(text) >= start else start


def _turn_start(chat: ChatRenderer, full_text: str, position: int, start: int, header_is_prompt: bool) -> int:
    """Return the start of the assistant turn `position`."""
    before, opened = chat.text(position), chat.text(position, opened=True)
    if full_text.startswith(before):
        shared = len(os.path.commonprefix([full_text, opened]))
        if not header_is_prompt or shared <= len(before):
            return len(before)
        return shared
    header = opened[len(before) :] if opened.startswith(before) else ""
    found = full_text.find(header, start) if header else -1
    if found < 0 or any(header in str(message.get("content")) for message in chat.messages):
        raise _unknown_place(chat, position)
    return found + len(header) if header_is_prompt else found


def _turn_end(chat: ChatRenderer, full_text: str, position: int, start: int) -> int:
    """Return the end of the assistant turn `position`."""
    text = chat.text(position + 1)
    closer = closing_token(text, chat.tokenizer)
    if full_text.startswith(text):
        return len(text.rstrip()) if closer else len(text)
    if closer is None or closer in str(chat.messages[position].get("content")):
        raise _unknown_place(chat, position)
    found = full_text.find(closer, start)
    if found < 0:
        raise _unknown_place(chat, position)
    return found + len(closer)


def closing_token(text: str, tokenizer: TokenizerType) -> str | None:
    """Return the special token that ends a rendered chat, ignoring trailing white space; None if there is none."""
    stripped = text.rstrip()
    return next((token for token in _special_tokens(tokenizer) if stripped.endswith(token)), None)


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: TokenizerType) -> tuple[str, ...]:
    added = (str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def _check_contents(chat: ChatRenderer, full_text: str, ends: Sequence[int]) -> None:
    """Check that each assistant turn holds its message's text, except reasoning, which templates move or drop."""
    start = 0
    for position, (message, end) in enumerate(zip(chat.messages, ends, strict=True)):
        content = message.get("content")
        if message["role"] == ASSISTANT and isinstance(content, str):
            answer = content.split("</think>")[-1].strip()
            if answer not in full_text[start:end]:
                raise _unknown_place(chat, position)
        start = end


def _unknown_place(chat: ChatRenderer, position: int) -> DataError:
    return DataError(
        f"the chat template renders message {position} (role {chat.messages[position]['role']!r}) differently "
        "once later messages follow, so its tokens cannot be distinguished from theirs. Use a chat template that only "
        "appends (policy.tokenizer.chat_template), or split the conversation."
    )


def get_formatted_message_log(
    message_log: LLMMessageLogType,
    tokenizer: TokenizerType,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    longest: int | None = None,
) -> LLMMessageLogType:
    """Render a whole conversation for supervised training, message by message.

    Each message gets the piece of the rendered chat that it adds: its text as `content`, its
    tokens as `token_ids`. The pieces joined are the rendered chat.

    Args:
        message_log: Messages with `role` and `content`.
        tokenizer: Renders and tokenises.
        task_data_spec: Its system prompt comes first; its prompt is put around the first user
            message; its rules decide which roles' control tokens are ordinary text.
        add_bos_token: Begin with the beginning-of-sequence token if the chat does not.
        add_eos_token: End with the end-of-sequence token if the chat does not end with a special
            token (line ends after it are dropped).
        add_generation_prompt: Give the header of an assistant turn to the message before it, as
            when generating.
        tools: Tool descriptions for the chat template.
        longest: Of a message with more tokens than this only the beginning may be encoded (see `encode_text`).

    Raises:
        DataError: The chat template rewrites earlier messages when later ones follow, so the
            pieces cannot be distinguished; or it cannot render the chat at all.
    """
    control = control_tokens_of(tokenizer)
    messages = control.quoted_chat(with_task_prompts(message_log, task_data_spec), task_data_spec.rules)
    tools = control.quoted_tools(tools, task_data_spec.rules)
    full_text = render_chat(messages, tokenizer, add_generation_prompt=False, tools=tools)
    chat = ChatRenderer(messages, tokenizer, tools)
    ends = message_ends(chat, full_text, header_is_prompt=add_generation_prompt)
    formatted: LLMMessageLogType = []
    for message, start, end in zip(messages, [0, *ends[:-1]], ends, strict=True):
        formatted.append({"role": control.shown(message["role"]), "content": full_text[start:end]})
    _add_ends(formatted, tokenizer, add_bos_token, add_eos_token)
    for message in formatted:
        message["token_ids"] = encode_text(message["content"], tokenizer, longest)
        message["content"] = control.shown(message["content"])
    return formatted


def with_task_prompts(messages: LLMMessageLogType, spec: TaskDataSpec) -> LLMMessageLogType:
    """Add the task's system prompt, and put its prompt around the first user message.

    A system message that the row already has follows the task's, after a blank line.

    Returns:
        The messages without tensors; lists of parts are joined to texts.

    Raises:
        DataError: A part is not text.
    """
    texts = [
        {key: value for key, value in message.items() if key not in TENSOR_KEYS} for message in with_texts(messages)
    ]
    for message in texts:
        if message["role"] == "user":
            message["content"] = spec.format_problem(message["content"])
            break
    if spec.system_prompt is not None:
        if texts and texts[0]["role"] == "system":
            texts[0]["content"] = f"{spec.system_prompt}\n\n{texts[0]['content']}"
        else:
            texts.insert(0, {"role": "system", "content": spec.system_prompt})
    return texts


def _add_ends(messages: LLMMessageLogType, tokenizer: TokenizerType, add_bos: bool, add_eos: bool) -> None:
    if not messages:
        return
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    if add_bos and bos and not messages[0]["content"].startswith(bos):
        messages[0]["content"] = bos + messages[0]["content"]
    if add_eos and eos:
        text = messages[-1]["content"].rstrip("\n")
        closed = text.endswith(eos) or closing_token(text, tokenizer) is not None
        messages[-1]["content"] = text if closed else text + eos


def sft_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = False,
) -> DatumSpec:
    """Return the whole conversation of a row's `messages`, one entry a message, for training on it."""
    message_log = get_formatted_message_log(
        datum_dict["messages"],
        tokenizer,
        task_data_spec,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        add_generation_prompt=add_generation_prompt,
        tools=datum_dict.get("tools"),
        longest=max_seq_length,
    )
    return finished_datum(message_log, None, datum_dict.get("task_name"), max_seq_length, idx)


def preference_preprocessor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> PreferenceDatumSpec:
    """Return the two conversations of a row's `pair`: context and best, context and worst completion."""
    pair = datum_dict.get("pair", datum_dict)
    ranked = sorted(pair["completions"], key=lambda completion: completion["rank"])
    how = (task_data_spec, tokenizer, max_seq_length, idx, add_bos, add_eos, add_generation_prompt)
    data = [
        sft_processor({"messages": [*pair["context"], *completion["completion"]]}, *how)
        for completion in (ranked[0], ranked[-1])
    ]
    datum = PreferenceDatumSpec(
        message_log_chosen=data[0]["message_log"],
        message_log_rejected=data[1]["message_log"],
        length_chosen=data[0]["length"],
        length_rejected=data[1]["length"],
        loss_multiplier=min(part["loss_multiplier"] for part in data),
        idx=idx,
    )
    if "margin" in pair:
        datum["margin"] = pair["margin"]
    return datum


def feedback_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> FeedbackDatumSpec:
    """Return the conversation of a row's `feedback`, context and completion, and whether it is desirable."""
    feedback = datum_dict["feedback"]
    how = (task_data_spec, tokenizer, max_seq_length, idx, add_bos, add_eos, add_generation_prompt)
    datum = sft_processor({"messages": [*feedback["context"], *feedback["completion"]]}, *how)
    return FeedbackDatumSpec(**datum, desirable=feedback["desirable"])


def finished_datum(
    message_log: LLMMessageLogType,
    info: dict[str, Any] | None,
    task_name: str | None,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a datum of a log with token ids; one that is longer than `max_seq_length` becomes a stub."""
    datum = DatumSpec(
        message_log=message_log,
        length=sum(len(message["token_ids"]) for message in message_log),
        extra_env_info=info,
        loss_multiplier=1.0,
        idx=idx,
    )
    if task_name is not None:
        datum["task_name"] = task_name
    if max_seq_length is not None and datum["length"] > max_seq_length:
        cut_to_stub(datum, max_seq_length)
    return datum


def cut_to_stub(datum: Any, max_seq_length: int | None) -> None:
    """Keep a few tokens of each message and set the weight in the loss to 0, in place.

    Args:
        datum: a datum of any processor, with logs under `message_log`, or `message_log_chosen` and `_rejected`.
        max_seq_length: longest prompt in tokens; None means no limit.
    """
    for side in ("", "_chosen", "_rejected"):
        message_log: LLMMessageLogType = datum.get(f"message_log{side}", ())
        if not message_log:
            continue
        room = STUB_TOKENS if max_seq_length is None else max_seq_length // len(message_log)
        keep = max(1, min(STUB_TOKENS, room))
        for message in message_log:
            for key, value in message.items():
                if isinstance(value, torch.Tensor):
                    message[key] = value[:keep].clone()
            message["content"] = content_text(message["content"])[:keep]
        datum[f"length{side}"] = sum(len(message["token_ids"]) for message in message_log)
        if (inputs := datum.get(f"{ROW_INPUTS}{side}")) is not None:
            datum[f"{ROW_INPUTS}{side}"] = inputs.without_items()
    datum["loss_multiplier"] = 0.0
