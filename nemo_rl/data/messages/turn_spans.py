"""Finds the span of each message of a conversation in its rendered chat.

Invariant: the spans cover the rendered chat without gap or overlap, and the span of an assistant turn is exactly the
text that a model would have to sample: from the end of the generation prompt to the token that ends the turn.

Two methods, tried in order:

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

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.rendering import render_chat
from nemo_rl.utils.errors import DataError

ASSISTANT = "assistant"


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
