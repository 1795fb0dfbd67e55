"""Tokenises and masks message logs, and joins them to tensors.

`processors` makes message logs, the algorithms train on flat tensors. Invariant: the token ids of a log, joined in
order, are exactly what the model saw; no function here re-tokenises a message that has them.

Legend: B conversations, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import (
    FlatMessagesType,
    LLMMessageLogType,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.content import with_texts
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.rendering import encode_text, render_chat
from nemo_rl.data.messages.turn_spans import ChatRenderer, closing_token, message_ends
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError

TOKEN_KEY = "token_ids"
TENSOR_KEYS = (TOKEN_KEY, "generation_logprobs", "token_loss_mask")


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> FlatMessagesType:
    """Join the values of all messages, key by key.

    Tensors are concatenated along axis 0; everything else is listed, one entry a message. A
    per-token tensor (as long as its message's `token_ids`) that some messages lack, such as the
    `generation_logprobs` of a user turn, counts as zeros there.

    Raises:
        DataError: A tensor key is absent from a message and is not per token.
    """
    keys = dict.fromkeys(key for message in message_log for key in message)
    flat: FlatMessagesType = {}
    for key in keys:
        values = [message.get(key) for message in message_log]
        if any(isinstance(value, torch.Tensor) for value in values):
            flat[key] = torch.cat(_with_zeros(key, message_log))
        else:
            flat[key] = values  # type: ignore[assignment]
    return flat


def _with_zeros(key: str, message_log: LLMMessageLogType) -> list[torch.Tensor]:
    present = next(m[key] for m in message_log if isinstance(m.get(key), torch.Tensor))
    per_token = present.dim() == 1 and all(
        len(m[key]) == len(m[TOKEN_KEY]) for m in message_log if isinstance(m.get(key), torch.Tensor) and TOKEN_KEY in m
    )
    tensors = []
    for position, message in enumerate(message_log):
        value = message.get(key)
        if not isinstance(value, torch.Tensor):
            if not per_token or TOKEN_KEY not in message:
                raise DataError(
                    f"message {position} (role {message.get('role')!r}) has no tensor {key!r}, "
                    "which other messages of the log have; add it, or drop it everywhere."
                )
            value = torch.zeros(len(message[TOKEN_KEY]), dtype=present.dtype)
        tensors.append(value)
    return tensors


def get_keys_from_message_log(message_log: LLMMessageLogType, keys: Sequence[str]) -> LLMMessageLogType:
    """Return the log with only these keys, where a message has them."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def add_loss_mask_to_message_log(
    batch_message_log: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Set `token_loss_mask` on every message, in place.

    The mask is 1-D int64, as long as `token_ids`: ones for the roles to train on, else zeros.

    Args:
        batch_message_log: The logs to mark.
        roles_to_train_on: Roles whose tokens count in the loss.
        only_unmask_final: Only the last message of a log counts, for any role.
    """
    for message_log in batch_message_log:
        for position, message in enumerate(message_log):
            final = position == len(message_log) - 1
            counts = final if only_unmask_final else message["role"] in roles_to_train_on
            message["token_loss_mask"] = torch.full_like(message[TOKEN_KEY], int(counts))


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """Flatten and right-pad a batch of logs.

    Args:
        message_log_batch: B logs.
        pad_value_dict: Padding value of each tensor key; 0 where not given.
        make_sequence_length_divisible_by: Round the padded length T up to a multiple of this.

    Returns:
        A batch whose tensor keys are [B, T] and whose other keys are lists of B lists (`role`,
        `content`), and the unpadded lengths [B] int64.

    Raises:
        DataError: The batch is empty, or a tensor key is absent from some of the logs.
    """
    if not message_log_batch:
        raise DataError("a batch of message logs needs at least one log, got none.")
    rows = [message_log_to_flat_messages(message_log) for message_log in message_log_batch]
    lengths = torch.tensor([len(row[TOKEN_KEY]) for row in rows], dtype=torch.int64)
    step = make_sequence_length_divisible_by
    width = -(-int(lengths.max()) // step) * step
    pad_values = pad_value_dict or {}
    batch: BatchedDataDict[Any] = BatchedDataDict()
    for key in dict.fromkeys(key for row in rows for key in row):
        column = [row.get(key) for row in rows]
        if any(isinstance(value, torch.Tensor) for value in column):
            batch[key] = _pad_column(key, column, width, pad_values.get(key, 0))
        else:
            batch[key] = column
    return batch, lengths


def _pad_column(key: str, column: list[Any], width: int, pad_value: int | float) -> torch.Tensor:
    missing = [row for row, value in enumerate(column) if not isinstance(value, torch.Tensor)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(column)} message logs have no tensor {key!r} "
            f"(first: log {missing[0]}), which the others have."
        )
    width = max(width, *(len(value) for value in column))
    padded = column[0].new_full((len(column), width, *column[0].shape[1:]), pad_value)
    for row, value in enumerate(column):
        padded[row, : len(value)] = value
    return padded


def message_log_shape(message_log: LLMMessageLogType) -> list[dict[str, torch.Size]]:
    """Return the shapes of the tensors of each message, for debugging."""
    return [
        {key: value.shape for key, value in message.items() if isinstance(value, torch.Tensor)}
        for message in message_log
    ]


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
        message[TOKEN_KEY] = encode_text(message["content"], tokenizer, longest)
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
