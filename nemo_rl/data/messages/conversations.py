"""Convert whole conversations to token ids for supervised training, message by message.

Each message gets its span of the rendered chat (`spans`) and the tokens of this span (`encoding`). The rendered chat is
compared with the row (`coverage`). The processors at the end of the file make data from conversations, pairs and
labelled conversations. Invariant: the tokens of an answer are those that a model would sample after the prompt. A
conversation that is too long becomes a short stub with `loss_multiplier` 0 and is never trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from nemo_rl.config.base.names import PLAIN_TEXT
from nemo_rl.data.images.image import Image
from nemo_rl.data.images.messages import expanded, images_in, inputs_of, load_images
from nemo_rl.data.interfaces import (
    DatumSpec,
    FeedbackDatumSpec,
    LLMMessageLogType,
    Message,
    PreferenceDatumSpec,
    ScoredDatumSpec,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.content import content_text, with_texts
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.coverage import RenderedChat
from nemo_rl.data.messages.encoding import encode_spans, render_chat, with_bos
from nemo_rl.data.messages.spans import ASSISTANT, ChatRenderer, final_token, message_ends, own_headers
from nemo_rl.data.messages.template_form import LOSS_FLAGS, is_excluded, tools_of
from nemo_rl.data.model_rows import ROW_INPUTS, RowInputs

TENSOR_KEYS = ("token_ids", "generation_logprobs", "token_loss_mask")
ENDS = "ends"
"""Key of a row of plain text: whether the text ends with this row."""
STUB_TOKENS = 4
"""Largest numbers of tokens and of characters that are kept of each message of a too long prompt."""


def get_formatted_message_log(
    message_log: LLMMessageLogType,
    tokenizer: TokenizerType,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    longest: int | None = None,
    num_counted: int | None = None,
) -> LLMMessageLogType:
    """Render a whole conversation for supervised training, message by message.

    Each message gets the part of the rendered chat that it adds, with the part's text as `content` and its tokens as
    `token_ids`. The parts of all messages together are the rendered chat.

    Args:
        task_data_spec: Specification of the task. Its system prompt comes first, and its prompt is put around the first
            user message. Its rules decide which texts are encoded as ordinary text.
        add_bos_token: Whether to begin with the beginning-of-sequence token if the tokenizer adds it to texts and the
            chat does not begin with it. Prompts follow the same rule.
        add_eos_token: Whether to end with the token that ends the last turn (`spans.final_token`) if the chat does not
            end with a special token. Line breaks at the end of the chat are then dropped.
        add_generation_prompt: Whether an assistant turn's header belongs to the message before it, as in generation.
        longest: Number of tokens above which only the beginning of a text may be encoded (`encode_text`).
        num_counted: Number of last messages of which assistant turns count in the loss, or None if only roles decide.

    Returns:
        One item for each message, with `counts` if the row or `num_counted` decides. A header that cannot belong to a
        message before it (of the first turn, or between two assistant turns) is its own item, which does not count.

    Raises:
        DataError: The chat template rewrites earlier messages when later ones follow, so that the parts of messages
            cannot be found; it leaves out a part of the row; it cannot render the chat; or an image cannot be used.
    """
    control = control_tokens_of(tokenizer)
    message_log = load_images(message_log, tokenizer, task_data_spec.images)
    given = with_task_prompts(message_log, task_data_spec)
    excluded = [is_excluded(message) for message in given]
    messages = control.quoted_chat([_without_flags(message) for message in given], task_data_spec.rules)
    tools = control.quoted_tools(tools, task_data_spec.rules)
    text = render_chat(messages, tokenizer, add_generation_prompt=False, tools=tools)
    chat = ChatRenderer(messages, tokenizer, tools)
    ends = message_ends(chat, text, header_is_prompt=add_generation_prompt)
    spans = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    RenderedChat(messages, tools, text, tokenizer).check(task_data_spec.may_leave_out, spans, task_data_spec.task_name)
    headers = own_headers(chat, text, ends) if add_generation_prompt else {}
    pieces: list[_RenderedPart] = []
    for position, (message, span, out) in enumerate(zip(messages, spans, excluded, strict=True)):
        sampled, header = message["role"] == ASSISTANT, headers.get(position, 0)
        usual = None if num_counted is None else sampled and position >= len(messages) - num_counted
        if header:
            pieces.append(_RenderedPart(message["role"], span[:header], False, False))
        pieces.append(_RenderedPart(message["role"], span[header:], sampled, False if out else usual))
    if pieces:
        _add_ends(pieces, chat, text, add_bos_token, add_eos_token)
    log = _message_log(pieces, tokenizer, longest)
    expand_images(log, images_in(message_log), tokenizer)
    return log


def expand_images(message_log: LLMMessageLogType, images: Sequence[Image], tokenizer: TokenizerType) -> None:
    """Replace the placeholders of images in the token ids of a log by the tokens of the images, in place.

    Raises:
        DataError: The numbers of placeholders and images differ.
    """
    token_ids = expanded([message["token_ids"] for message in message_log], images, tokenizer)
    for message, ids in zip(message_log, token_ids, strict=True):
        message["token_ids"] = ids


@dataclass
class _RenderedPart:
    """A part of a rendered chat that becomes an entry of a message log."""

    role: str
    """Role of the message to which the part belongs."""
    text: str
    sampled: bool
    """Whether a model samples this part."""
    counts: bool | None
    """Whether the part counts in the loss. If None, the role decides."""


def _message_log(pieces: list[_RenderedPart], tokenizer: TokenizerType, longest: int | None) -> LLMMessageLogType:
    """Return an entry for each part with role, text and token ids, and with `counts` unless the role decides."""
    control = control_tokens_of(tokenizer)
    texts, sampled = [piece.text for piece in pieces], [piece.sampled for piece in pieces]
    ids = encode_spans("".join(texts), list(accumulate(map(len, texts))), sampled, tokenizer, longest)
    return [
        {"role": control.shown(piece.role), "content": control.shown(piece.text), "token_ids": token_ids}
        | ({} if piece.counts is None else {"counts": piece.counts})
        for piece, token_ids in zip(pieces, ids, strict=True)
    ]


def _without_flags(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in LOSS_FLAGS}


def with_task_prompts(messages: LLMMessageLogType, spec: TaskDataSpec) -> LLMMessageLogType:
    """Add the task's system prompt, and put the task's prompt around the first user message.

    If the row already has a system message, its text follows the task's system prompt after a blank line.

    Returns:
        The messages without tensors, with lists of parts joined to texts.

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


def _add_ends(pieces: list[_RenderedPart], chat: ChatRenderer, text: str, add_bos: bool, add_eos: bool) -> None:
    """Add the first part's beginning-of-sequence token and the last part's end-of-turn token, in place."""
    if add_bos:
        pieces[0].text = with_bos(pieces[0].text, chat.tokenizer)
    if add_eos:
        pieces[-1].text = pieces[-1].text.rstrip("\n") + (final_token(chat, text) or "")


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
    """Return the whole conversation of a row's `messages` for training, with one entry per message.

    A row of plain text (`PLAIN_TEXT`) becomes one item without a chat template, in which every token counts. If the
    text ends with this row (`ENDS`), the tokenizer's end-of-sequence token follows.
    """
    if PLAIN_TEXT in datum_dict:
        pieces = [_plain_text(datum_dict, tokenizer, task_data_spec, add_bos, add_eos)]
        log = _message_log(pieces, tokenizer, max_seq_length)
        expand_images(log, (), tokenizer)
        return finished_datum(log, None, datum_dict.get("task_name"), max_seq_length, idx, inputs_of((), tokenizer))
    how = (task_data_spec, tokenizer, max_seq_length, idx, add_bos, add_eos, add_generation_prompt)
    return _conversation(datum_dict, None, *how)


def _plain_text(
    row: dict[str, Any], tokenizer: TokenizerType, spec: TaskDataSpec, add_bos: bool, add_eos: bool
) -> _RenderedPart:
    (message,) = control_tokens_of(tokenizer).quoted_chat([{"role": ASSISTANT, "content": row[PLAIN_TEXT]}], spec.rules)
    text = message["content"]
    text = with_bos(text, tokenizer) if add_bos else text
    if add_eos and row[ENDS] and tokenizer.eos_token is not None:
        text += tokenizer.eos_token
    return _RenderedPart(ASSISTANT, text, False, True)


def _conversation(
    row: dict[str, Any],
    num_counted: int | None,
    spec: TaskDataSpec,
    tokenizer: TokenizerType,
    longest: int | None,
    idx: int,
    add_bos: bool,
    add_eos: bool,
    add_generation_prompt: bool,
) -> DatumSpec:
    """Return the datum of a row's `messages`. The arguments are those of the functions above."""
    messages = load_images(row["messages"], tokenizer, spec.images)
    message_log = get_formatted_message_log(
        messages,
        tokenizer,
        spec,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        add_generation_prompt=add_generation_prompt,
        tools=tools_of(row),
        longest=longest,
        num_counted=num_counted,
    )
    inputs = inputs_of(images_in(messages), tokenizer)
    return finished_datum(message_log, None, row.get("task_name"), longest, idx, inputs)


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
    """Return the two conversations of a row's `pair`: the context with the best or with the worst completion."""
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
    if ROW_INPUTS in data[0]:
        datum["row_inputs_chosen"], datum["row_inputs_rejected"] = (each["row_inputs"] for each in data)
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
    """Return the conversation of a row's `feedback` (context and completion), with its label."""
    feedback = datum_dict["feedback"]
    how = (task_data_spec, tokenizer, max_seq_length, idx, add_bos, add_eos, add_generation_prompt)
    datum = _answered(feedback["context"], feedback["completion"], feedback.get("tools"), *how)
    return FeedbackDatumSpec(**datum, desirable=feedback["desirable"])


def scored_answer_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    **flags: bool,
) -> ScoredDatumSpec:
    """Return the conversation of a row's `scored` (context and completion), with its scores.

    Args:
        **flags: `add_bos`, `add_eos` and `add_generation_prompt` of `feedback_processor`.
    """
    scored = datum_dict["scored"]
    chosen = [flags.get(name, True) for name in ("add_bos", "add_eos", "add_generation_prompt")]
    how = (task_data_spec, tokenizer, max_seq_length, idx, *chosen)
    datum = _answered(scored["context"], scored["completion"], scored.get("tools"), *how)
    return ScoredDatumSpec(**datum, scores=scored["scores"])


def _answered(
    context: list[Message], completion: list[Message], tools: list[dict[str, Any]] | None, *how: Any
) -> DatumSpec:
    """Return a conversation in which only the assistant's turns of the completion count in the loss."""
    return _conversation({"messages": [*context, *completion], "tools": tools}, len(completion), *how)


def finished_datum(
    message_log: LLMMessageLogType,
    info: dict[str, Any] | None,
    task_name: str | None,
    max_seq_length: int | None,
    idx: int,
    inputs: RowInputs | None = None,
) -> DatumSpec:
    """Make a datum of a log with token ids. A log that is longer than `max_seq_length` becomes a short stub."""
    datum = DatumSpec(
        message_log=message_log,
        length=sum(len(message["token_ids"]) for message in message_log),
        extra_env_info=info,
        loss_multiplier=1.0,
        idx=idx,
    )
    if task_name is not None:
        datum["task_name"] = task_name
    if inputs is not None:
        datum["row_inputs"] = inputs
    if max_seq_length is not None and datum["length"] > max_seq_length:
        cut_to_stub(datum, max_seq_length)
    return datum


def cut_to_stub(datum: Any, max_seq_length: int | None) -> None:
    """Keep a few tokens of each message and set the weight in the loss to 0, in place.

    Args:
        datum: a datum of any processor, with `message_log`, or `message_log_chosen` and `message_log_rejected`.
        max_seq_length: largest number of tokens of a prompt, or None for no limit.
    """
    for side in ("", "_chosen", "_rejected"):
        message_log: LLMMessageLogType = datum.get(f"message_log{side}", ())
        if not message_log:
            continue
        inputs: RowInputs | None = datum.get(f"{ROW_INPUTS}{side}")
        if inputs is not None:
            _leave_out_images(message_log, inputs)
            datum[f"{ROW_INPUTS}{side}"] = inputs.without_items()
        room = STUB_TOKENS if max_seq_length is None else max_seq_length // len(message_log)
        keep = max(1, min(STUB_TOKENS, room))
        for message in message_log:
            for key, value in message.items():
                if isinstance(value, torch.Tensor):
                    message[key] = value[:keep].clone()
            message["content"] = content_text(message["content"])[:keep]
        datum[f"length{side}"] = sum(len(message["token_ids"]) for message in message_log)
    datum["loss_multiplier"] = 0.0


def _leave_out_images(message_log: LLMMessageLogType, inputs: RowInputs) -> None:
    """Remove the tokens of images from a log, in place. A message of an image alone keeps no token."""
    if inputs.images is None:
        return
    for message in message_log:
        message["token_ids"] = inputs.images.kept_tokens(message["token_ids"])
