"""Read a chat completion.

Invariants: an answer is what the server says, or there is none; an answer that the server has withheld is none; texts
have no halves of characters.
"""

import json
from collections.abc import Mapping
from typing import Any

from nemo_rl.models.generation.interfaces import FinishReason
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatToolCall, whole

_FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}
WITHHELD = "content_filter"


class UnreadableError(ValueError):
    """The JSON is no chat completion."""


class WithheldError(ValueError):
    """The server has withheld the answer."""


def read_completion(completion: Any) -> tuple[ChatAnswer, FinishReason]:
    """Return the answer of a completion, and why it ended.

    Raises:
        UnreadableError: it is none; the message says what is wrong.
        WithheldError: the server has withheld the answer.
    """
    if not isinstance(completion, Mapping):
        raise UnreadableError(f"a {type(completion).__name__} in place of an object")
    if "choices" not in completion and completion.get("error"):
        raise UnreadableError(f"status 200 with an error: {completion['error']}")
    try:
        choice = completion["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        if reason == WITHHELD:
            raise WithheldError(f"finish_reason={WITHHELD}")
        if reason not in _FINISH_REASONS:
            raise UnreadableError(f"finish_reason={reason!r}")
        answer = ChatAnswer(
            _text(message, "content") or _text(message, "refusal") or "",
            _text(message, "reasoning_content") or _text(message, "reasoning"),
            [_call(call, number) for number, call in enumerate(message.get("tool_calls") or ())],
            _stop_string(choice),
            *_counts(completion.get("usage")),
        )
    except (TypeError, LookupError, AttributeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None
    return answer, _FINISH_REASONS[reason]


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if isinstance(value, list):  # parts, as some servers write them
        value = "".join(part["text"] for part in value if part.get("type") == "text")
    if not (value is None or isinstance(value, str)):
        raise UnreadableError(f"{name} is a {type(value).__name__}")
    return None if value is None else whole(value)


def _call(call: Mapping[str, Any], number: int) -> ChatToolCall:
    function = call["function"]
    return ChatToolCall(
        whole(str(call.get("id") or f"call_{number}")),
        whole(str(function["name"])),
        _arguments(function["arguments"] or {}),
    )


def _arguments(given: Any) -> str:
    """Return arguments as JSON text, also where a server sends an object."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        decoded = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return whole(text)
    # Escapes can stand for halves of characters too, which would come back where the text is decoded.
    return whole(text) if whole(decoded) == decoded else whole(decoded)


def _stop_string(choice: Mapping[str, Any]) -> str | None:
    """Return the stop string, which vLLM and SGLang name; a number there is the token that ended the answer."""
    found = choice.get("stop_reason", choice.get("matched_stop"))
    return whole(found) if isinstance(found, str) and found else None


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """Return the tokens of answer and prompt."""
    if not isinstance(usage, Mapping):
        return None, None
    counts = [usage.get(name) for name in ("completion_tokens", "prompt_tokens")]
    answer, prompt = (count if isinstance(count, int) and count >= 0 else None for count in counts)
    return answer, prompt
