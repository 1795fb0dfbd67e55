"""Convert messages to the form that a chat template supports: known roles, texts, and arguments of calls.

Invariant: all messages that are tokenised go through `for_template` (supervised rows, prompts, observations and
requests of agents), so roles and tool calls have the same meaning for all of them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import jinja2

from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.images.messages import template_content
from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import with_texts
from nemo_rl.utils.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""Roles of messages in rows, observations and requests."""

_RENAMED = {"environment": "user", "function": "tool"}
"""Roles that chat templates do not support, with the role that replaces them."""


def known_role(role: str, *, knows_developer: bool) -> str:
    """Return the role under which messages of a role are rendered or sent to servers."""
    return "system" if role == "developer" and not knows_developer else _RENAMED.get(role, role)


type ArgumentsForm = Literal["mapping", "text"]


def for_template(messages: Sequence[Message], tokenizer: TokenizerType) -> list[dict[str, Any]]:
    """Return the messages in the form of the tokenizer's chat template.

    The role "environment" becomes "user", "function" becomes "tool", and "developer" becomes "system" if the template
    does not know it. Lists of parts are joined, unless the template reads images. The arguments of tool calls become
    mappings, or JSON text for templates that join arguments to other text.

    Args:
        messages: Messages with `role` and `content`.
        tokenizer: Tokenizer with the chat template.

    Raises:
        DataError: A part is not text.
    """
    return [_for_template(message, tokenizer) for message in with_texts(messages)]


def _for_template(message: dict[str, Any], tokenizer: TokenizerType) -> dict[str, Any]:
    knows_developer = "developer" in str(tokenizer.chat_template)
    message["role"] = known_role(str(message.get("role")), knows_developer=knows_developer)
    if message.get("tool_calls"):
        form = arguments_form(tokenizer)
        message["tool_calls"] = [_call(call, form) for call in message["tool_calls"]]
        message["content"] = message.get("content") or ""
    message["content"] = template_content(message.get("content"), tokenizer)
    return message


def _call(call: Any, form: ArgumentsForm) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    given = arguments_text(arguments) if form == "text" else arguments_value(arguments)
    made = {**function, "arguments": given}
    return {**call, "function": made} if "function" in call else made


def arguments_value(arguments: Any) -> Any:
    """Return the arguments of a call as a value, or as a text if they are not JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text. If they are a text, return it unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_KEY, _VALUE = "PROBE_KEY", "PROBE_VALUE"
_AS_TEXT = json.dumps({_KEY: _VALUE})


def arguments_form(tokenizer: TokenizerType) -> ArgumentsForm:
    """Return the form of arguments that the tokenizer's chat template writes as JSON.

    The template renders a call in each form. The form is "text" if the template writes a text unchanged, but fails for
    a mapping or writes it like Python's `print`.
    """
    return _probed(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _probed(tokenizer: TokenizerType, template: str) -> ArgumentsForm:
    mapping, text = _written(tokenizer, {_KEY: _VALUE}), _written(tokenizer, _AS_TEXT)
    fits = mapping is not None and (f"'{_KEY}'" not in mapping and _VALUE in mapping)
    return "text" if not fits and text is not None and _AS_TEXT in text else "mapping"


def _written(tokenizer: TokenizerType, arguments: Any) -> str | None:
    """Return a rendered chat with a call, or None if the template fails."""
    function = {"name": "probe", "arguments": arguments}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "QUESTION"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def tools_of(row: Mapping[str, Any], key: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tool descriptions of a row (a list, or its JSON text), or None without descriptions.

    Raises:
        RowError: The descriptions are not a list of objects.
    """
    tools = row.get(key)
    if isinstance(tools, str) and tools.strip():
        tools = parsed_json(tools, repr(key))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"{key!r} is not a list of tool descriptions")
    return [dict(tool) for tool in tools]


def parsed_json(text: str, what: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RowError: The text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # raised by `int` for thousands of digits
        raise RowError(f"{what} is not valid JSON") from None


LOSS_FLAGS = ("weight", "loss", "train", "training", "trainable", "train_on_turn")
"""Keys of a message that say whether it counts in the loss. `weight` is OpenAI's key; the others are also common."""


def is_excluded(message: Mapping[str, Any]) -> bool:
    """Return whether a message says that it does not count in the loss.

    Raises:
        DataError: A flag is neither 0 or 1 nor true or false.
    """
    flags = {key: message[key] for key in LOSS_FLAGS if message.get(key) is not None}
    odd = next(((key, value) for key, value in flags.items() if value not in (0, 1)), None)
    if odd is not None:
        raise DataError(
            f"{odd[0]!r} of a message is {odd[1]!r}; a message counts in the loss as a whole (1, true) or not at all "
            "(0, false)"
        )
    return any(not value for value in flags.values())
