"""Find the span of each message in a rendered chat.

Invariant: the spans cover the rendered chat without gap or overlap. The span of an assistant turn is exactly the text
that a model would have to sample, from the end of the generation prompt to the token that ends the turn. If a turn has
no such token, the control token that begins the next turn's header ends the turn, and belongs to its span.

Spans are found by two methods, tried in order:

1. Prefixes. The chat up to a message, rendered alone, is the beginning of the whole chat. This is exact.
2. Markers, for templates that render a turn differently once later ones follow (Qwen3 leaves `<think>` out of earlier
   turns). The text that opens an assistant turn and the token that closes it are searched in the rendered chat. If
   their number or their content does not fit the messages, the chat is refused.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.utils.errors import DataError

ASSISTANT = "assistant"
_PROBES = ("A", "7")
"""Two answers without a common start."""
_FOLLOWING = {"role": "user", "content": "QUESTION"}


@dataclass(frozen=True)
class ChatRenderer:
    """Render the first messages of a conversation."""

    messages: Sequence[Message]
    """The whole conversation."""
    tokenizer: TokenizerType
    """Tokenizer whose chat template is used."""
    tools: list[dict[str, Any]] | None = None
    """Tool descriptions, or None."""

    def text(self, count: int, *, opened: bool = False) -> str:
        """Render the first `count` messages, followed by the header of an assistant turn if `opened`."""
        if count == 0 and not opened:
            return ""
        return self._render(self.messages[:count], opened)

    def shared_beginning(self, position: int, following: Sequence[Message]) -> str:
        """Return the rendered text before the answer of an assistant turn, which does not depend on the answer.

        Args:
            position: index of the message that is the assistant turn.
            following: messages after the turn, which may change how templates write the turn's header.

        Raises:
            DataError: the template refuses a plain answer at this position.
        """
        chats = [[*self.messages[:position], {"role": ASSISTANT, "content": probe}, *following] for probe in _PROBES]
        return os.path.commonprefix([self._render(chat) for chat in chats])

    def _render(self, messages: Sequence[Message], opened: bool = False) -> str:
        return render_chat(messages, self.tokenizer, add_generation_prompt=opened, tools=self.tools)


def message_ends(chat: ChatRenderer, full_text: str, *, header_is_prompt: bool) -> list[int]:
    """Return the end of each message's text in `full_text`, where the next message begins.

    White space after the token that closes an assistant turn belongs to the next message, because no model samples it.

    Args:
        chat: the conversation.
        full_text: `chat` rendered as a whole.
        header_is_prompt: whether the header of an assistant turn belongs to the message before it.

    Raises:
        DataError: the template rewrites earlier turns in such a way that their spans cannot be found.
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
        ends.append(max(start, end))
    _check_answers(chat, full_text, ends)
    return ends


def own_headers(chat: ChatRenderer, full_text: str, ends: Sequence[int]) -> dict[int, int]:
    """Return the lengths of headers that are in the span of an assistant turn, although no model samples them.

    Args:
        chat: the conversation.
        full_text: `chat` rendered as a whole.
        ends: the ends of the messages, as `message_ends` returns them with `header_is_prompt`.

    Returns:
        Number of characters at the beginning of the span, by the index of the message. Only assistant turns that are
        the first message or follow another assistant turn have such headers.
    """
    roles = [message["role"] for message in chat.messages]
    starts = [0, *ends[:-1]]
    return {
        position: end - starts[position]
        for position, role in enumerate(roles)
        if role == ASSISTANT and (position == 0 or roles[position - 1] == ASSISTANT)
        if starts[position] < (end := _own_header_end(chat, full_text, position)) <= ends[position]
    }


def _prefix_end(chat: ChatRenderer, full_text: str, position: int, start: int) -> int:
    """Return the end of a message before another prompt message. Text of both turns belongs to the second one."""
    try:
        text = chat.text(position + 1)
    except DataError:  # the template requires a user message at the end
        return start
    return len(text) if full_text.startswith(text) and len(text) >= start else start


def _turn_start(chat: ChatRenderer, full_text: str, position: int, start: int, header_is_prompt: bool) -> int:
    """Return the start of the assistant turn `position`."""
    before, opened = chat.text(position), chat.text(position, opened=True)
    if full_text.startswith(before):
        if not header_is_prompt or len(opened) <= len(before):
            return len(before)
        if full_text.startswith(opened):
            return len(opened)
        return max(len(before), _own_header_end(chat, full_text, position))
    header = opened[len(before) :] if opened.startswith(before) else ""
    short = _end_that_begins(header, chat.shared_beginning(position, [_FOLLOWING]))
    found = full_text.find(short, start) if short else -1
    if found < 0 or any(short in str(message.get("content")) for message in chat.messages):
        raise _unknown_place(chat, position)
    if not header_is_prompt:
        return found
    return found + len(header if full_text.startswith(header, found) else short)


def _own_header_end(chat: ChatRenderer, full_text: str, position: int) -> int:
    """Return the end of a header that differs from the generation prompt: the end of the text common to all answers."""
    for following in (chat.messages[position + 1 :], [_FOLLOWING]):
        header = chat.shared_beginning(position, following)
        if full_text.startswith(header):
            return len(header)
    return 0


def _end_that_begins(header: str, text: str) -> str:
    """Return the longest prefix of `header` that is a suffix of `text`."""
    return next((header[:size] for size in range(len(header), 0, -1) if text.endswith(header[:size])), "")


def _turn_end(chat: ChatRenderer, full_text: str, position: int, start: int) -> int:
    """Return the end of the assistant turn `position`. If no token closes it, the next header's control token does."""
    text = chat.text(position + 1)
    closer = closing_token(text, chat.tokenizer)
    if full_text.startswith(text):
        return len(text.rstrip()) if closer else _with_next_header(chat, full_text, position, len(text))
    if closer is None or closer in str(chat.messages[position].get("content")):
        raise _unknown_place(chat, position)
    found = full_text.find(closer, start)
    if found < 0:
        raise _unknown_place(chat, position)
    return found + len(closer)


def _with_next_header(chat: ChatRenderer, full_text: str, position: int, end: int) -> int:
    """Return the end of the control token after a turn. Return `end` if there is none or an assistant turn follows."""
    if chat.messages[position + 1]["role"] == ASSISTANT:
        return end
    rest = full_text[end:]
    token = _control_token_at_start(rest.lstrip(), chat.tokenizer)
    return end if token is None else end + len(rest) - len(rest.lstrip()) + len(token)


def closing_token(text: str, tokenizer: TokenizerType) -> str | None:
    """Return the special token that ends a rendered chat, apart from white space, or None if there is none."""
    stripped = text.rstrip()
    return next((token for token in _special_tokens(tokenizer) if stripped.endswith(token)), None)


def final_token(chat: ChatRenderer, full_text: str) -> str | None:
    """Return the token that a model samples at the end of the last turn, or None if the chat already has it.

    Templates may end a turn with the control token of the next header (a tool's result after a call, or a user's turn).
    This token is returned if the model's generation config stops at it, or else the end-of-sequence token.
    """
    tokenizer = chat.tokenizer
    if closing_token(full_text, tokenizer) is not None or full_text.rstrip("\n").endswith(tokenizer.eos_token or "\0"):
        return None
    last = chat.messages[-1]
    following = {"role": "tool", "content": "RESULT"} if last.get("tool_calls") else _FOLLOWING
    try:
        longer = ChatRenderer([*chat.messages, following], tokenizer, chat.tools).text(len(chat.messages) + 1)
    except DataError:
        return tokenizer.eos_token
    header = longer.removeprefix(full_text) if longer.startswith(full_text) else ""
    token = _control_token_at_start(header.lstrip(), tokenizer)
    stops = token is not None and tokenizer.convert_tokens_to_ids(token) in _stop_ids(str(tokenizer.name_or_path))
    return token if stops else tokenizer.eos_token


@lru_cache(maxsize=8)
def _stop_ids(name: str) -> frozenset[int]:
    """Return the tokens at which the tokenizer's model stops, according to its files, or an empty set."""
    # # transformers is imported here because it imports image libraries, which most runs do not need.
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(name, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _control_token_at_start(text: str, tokenizer: TokenizerType) -> str | None:
    return next((token for token in control_tokens_of(tokenizer).written if text.startswith(token)), None)


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: TokenizerType) -> tuple[str, ...]:
    added = (str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def _check_answers(chat: ChatRenderer, full_text: str, ends: Sequence[int]) -> None:
    """Check that each assistant turn contains its message's text, except reasoning, which templates move or drop."""
    start = 0
    for position, (message, end) in enumerate(zip(chat.messages, ends, strict=True)):
        content = message.get("content")
        if message["role"] == ASSISTANT and isinstance(content, str):
            answer = content.split("</think>")[-1].strip()
            if answer not in full_text[start:end] and answer in full_text:
                raise _unknown_place(chat, position)
        start = end


def _unknown_place(chat: ChatRenderer, position: int) -> DataError:
    return DataError(
        f"the chat template renders message {position} (role {chat.messages[position]['role']!r}) differently "
        "once later messages follow, so its tokens cannot be distinguished from theirs. Use a chat template that only "
        "appends (policy.tokenizer.chat_template), or split the conversation."
    )
