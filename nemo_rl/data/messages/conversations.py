"""Turns whole conversations into token ids for supervised training, message by message.

The processors at the end make data of rows: conversations, pairs of them, labelled ones. Each message gets the span of
the rendered chat that belongs to it (`spans`), and its tokens (`encoding`); the chat is compared with the row
(`coverage`). Invariant: the tokens of an answer are those that a model samples after the prompt. A conversation that is
too long becomes a short stub with `loss_multiplier` 0 and is never trained on.
"""

from itertools import accumulate
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
from nemo_rl.data.messages.coverage import RenderedChat
from nemo_rl.data.messages.encoding import encode_spans, with_bos
from nemo_rl.data.messages.loss_flags import LOSS_FLAGS, is_excluded
from nemo_rl.data.messages.rendering import render_chat
from nemo_rl.data.messages.spans import ASSISTANT, ChatRenderer, final_token, message_ends
from nemo_rl.data.messages.tools import tools_of
from nemo_rl.data.model_rows import ROW_INPUTS

TENSOR_KEYS = ("token_ids", "generation_logprobs", "token_loss_mask")
STUB_TOKENS = 4
"""Most tokens, and characters of text, kept of each message of a prompt that is too long."""


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
        add_bos_token: Begin with the beginning-of-sequence token if the tokenizer adds it to texts and the chat does
            not begin with it; prompts follow the same rule.
        add_eos_token: End with the token that ends the last turn (`spans.final_token`) if the chat does not end with a
            special token; line ends after it are dropped.
        add_generation_prompt: Give the header of an assistant turn to the message before it, as
            when generating.
        tools: Tool descriptions for the chat template.
        longest: Of a message with more tokens than this only the beginning may be encoded (see `encode_text`).

    Raises:
        DataError: The chat template rewrites earlier messages when later ones follow, so the
            pieces cannot be distinguished; it leaves out a part of the row; or it cannot render the chat at all.
    """
    control = control_tokens_of(tokenizer)
    given = with_task_prompts(message_log, task_data_spec)
    excluded = [is_excluded(message) for message in given]
    messages = control.quoted_chat([_without_flags(message) for message in given], task_data_spec.rules)
    tools = control.quoted_tools(tools, task_data_spec.rules)
    text = render_chat(messages, tokenizer, add_generation_prompt=False, tools=tools)
    chat = ChatRenderer(messages, tokenizer, tools)
    ends = message_ends(chat, text, header_is_prompt=add_generation_prompt)
    spans = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    RenderedChat(messages, tools, text, tokenizer).check(task_data_spec.may_leave_out, spans, task_data_spec.task_name)
    if spans:
        _add_ends(spans, chat, text, add_bos_token, add_eos_token)
    return _message_log(messages, spans, excluded, tokenizer, longest)


def _message_log(
    messages: list[Message], spans: list[str], excluded: list[bool], tokenizer: TokenizerType, longest: int | None
) -> LLMMessageLogType:
    """Return one entry for each message: role, text, token ids, and `counts` where the row excludes the turn."""
    control = control_tokens_of(tokenizer)
    sampled = [message["role"] == ASSISTANT for message in messages]
    ends = list(accumulate(map(len, spans)))
    formatted: LLMMessageLogType = []
    ids = encode_spans("".join(spans), ends, sampled, tokenizer, longest)
    for message, span, token_ids, out in zip(messages, spans, ids, excluded, strict=True):
        entry: Message = {"role": control.shown(message["role"]), "content": control.shown(span)}
        formatted.append({**entry, "token_ids": token_ids} | ({"counts": False} if out else {}))
    return formatted


def _without_flags(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in LOSS_FLAGS}


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


def _add_ends(spans: list[str], chat: ChatRenderer, text: str, add_bos: bool, add_eos: bool) -> None:
    """Add the token that begins a sequence to the first span, and the one that ends the last turn, in place."""
    if add_bos:
        spans[0] = with_bos(spans[0], chat.tokenizer)
    if add_eos:
        spans[-1] = spans[-1].rstrip("\n") + (final_token(chat, text) or "")


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
        tools=tools_of(datum_dict),
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
    tools = pair.get("tools")
    data = [_answered(pair["context"], completion["completion"], tools, *how) for completion in (ranked[0], ranked[-1])]
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
    datum = _answered(feedback["context"], feedback["completion"], feedback.get("tools"), *how)
    return FeedbackDatumSpec(**datum, desirable=feedback["desirable"])


def _answered(
    context: list[Message], completion: list[Message], tools: list[dict[str, Any]] | None, *how: Any
) -> DatumSpec:
    """Return a conversation in which the assistant's turns of the completion count, and no other turn does."""
    datum = sft_processor({"messages": [*context, *completion], "tools": tools}, *how)
    log = datum["message_log"]
    for position, message in enumerate(log):
        in_completion = position >= len(log) - len(completion)
        message["counts"] = in_completion and message["role"] == ASSISTANT and message.get("counts", True)
    return datum


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
