"""Check that a rendered chat contains everything that its messages and tools contain.

Chat templates silently leave out what they do not support: tool calls, tools, roles or reasoning. Invariant: each text,
call, argument and tool of a row is found in the rendered text. Otherwise the row is refused with the reason, unless the
configuration allows the loss (`data.template_may_leave_out`).
"""

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nemo_rl.config.schema.data import MAY_LEAVE_OUT, LeftOut
from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import IMAGE_MARK, texts_between
from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.data.messages.template_form import LOSS_FLAGS, arguments_value
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message for its reasoning: the text that the model writes before its answer."""

_READ = frozenset(("role", "content", "tool_calls", "tool_call_id", "counts", *REASONING_KEYS, *LOSS_FLAGS))
_PROBE = "PROBE7Q"
_WHAT: dict[LeftOut, str] = {
    "messages": "the text of a message of the role {role!r}",
    "reasoning": "the reasoning of an assistant message",
    "tool_calls": "the tool calls of an assistant message",
    "call_ids": "the ids of tool calls",
    "tools": "the tools",
    "tool_descriptions": "the descriptions of tools",
}


@dataclass(frozen=True)
class RenderedChat:
    """A chat and its rendered text."""

    messages: Sequence[Message]
    """The messages that were rendered, with control tokens quoted."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tool descriptions, or None."""
    text: str
    """The rendered chat."""
    tokenizer: TokenizerType
    """Tokenizer with the chat template."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template."""

    def check(
        self, may_leave_out: Collection[str] | None = None, spans: Sequence[str] | None = None, task: str | None = None
    ) -> None:
        """Check that the rendered text contains everything that the chat contains.

        Missing parts that are allowed are reported once, except ids of calls. Unused keys of messages are also reported
        once.

        Args:
            may_leave_out: Kinds of parts that may be left out, or None for `MAY_LEAVE_OUT`.
            spans: The rendered text of each message, or None if it is not known.
            task: Name of the data set's task, for the report.

        Raises:
            DataError: Any other part is missing.
        """
        allowed = MAY_LEAVE_OUT if may_leave_out is None else may_leave_out
        for kind, role in dict.fromkeys(self._left_out(spans)):
            what = _WHAT[kind].format(role=role)
            if kind not in allowed:
                raise DataError(
                    f"the chat template leaves out {what}. Use a chat template that writes it "
                    f"(policy.tokenizer.chat_template), or allow the loss: data.template_may_leave_out with {kind!r}."
                )
            if kind != "call_ids":
                _report_left_out(str(self.tokenizer.name_or_path), task, what, kind)
        for key in self._unused_keys():
            _report_unused(str(self.tokenizer.name_or_path), task, key)

    def _left_out(self, spans: Sequence[str] | None) -> Iterator[tuple[LeftOut, str]]:
        for tool in self.tools or ():
            if not all(_holds(self.text, name) for name in _tool_names(tool)):
                yield "tools", ""
            if not all(_holds(self.text, text) for text in _tool_descriptions(tool)):
                yield "tool_descriptions", ""
        for position, message in enumerate(self.messages):
            text = self.text if spans is None else spans[position]
            role = str(message.get("role"))
            thought, said = _divided(message)
            if not self._has_said(position, text, said):
                yield "messages", role
            if not all(_holds(text, each) for each in thought):
                yield "reasoning", role
            for call in message.get("tool_calls") or ():
                if not all(_holds(text, each) for each in _call_texts(call)):
                    yield "tool_calls", role
            if not all(each in text for each in _ids(message)):
                yield "call_ids", role

    def _has_said(self, position: int, span: str, said: str) -> bool:
        """Return whether a message's text is in its span, or elsewhere if the template moves messages of its role."""
        pieces = tuple(piece for piece in said.split(IMAGE_MARK) if piece.strip())
        if all(_holds(span, piece) for piece in pieces):
            return True
        if self.messages[position].get("role") == "assistant" or not all(_holds(self.text, each) for each in pieces):
            return False
        probed = [*self.messages]
        probed[position] = {**probed[position], "content": _PROBE}
        tools = None if self.tools is None else [dict(tool) for tool in self.tools]
        try:
            text = render_chat(
                probed, self.tokenizer, add_generation_prompt=False, tools=tools, template_kwargs=self.template_kwargs
            )
        except DataError:
            return True
        return _PROBE in text

    def _unused_keys(self) -> list[str]:
        """Return the keys of messages that neither the library nor the chat template reads."""
        template = str(self.tokenizer.chat_template)
        found = {
            (key, value if isinstance(value, str) else "")
            for message in self.messages
            for key, value in message.items()
            if key not in _READ and value is not None
        }
        mentioned = {key for key, _ in found if re.search(rf"\b{re.escape(key)}\b", template)}
        # # A template that names functions also contains "name", so the value of this key is searched.
        unwritten = {key for key, value in found if key == "name" and value not in self.text}
        return sorted({key for key, _ in found} - mentioned | unwritten)


def _tool_names(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a tool and the names of its arguments, which a model needs to call it."""
    function = _function(tool)
    yield str(function.get("name", ""))
    yield from (name for name, _ in _arguments(function.get("parameters")))


def _tool_descriptions(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield the other texts of a tool: descriptions of the tool and its arguments, and the allowed values."""
    function = _function(tool)
    yield str(function.get("description") or "")
    for _, schema in _arguments(function.get("parameters")):
        yield str(schema.get("description") or "")
        yield from (choice for choice in schema.get("enum") or () if isinstance(choice, str))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _arguments(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and schema of each argument, including nested arguments."""
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    for name, below in properties.items() if isinstance(properties, Mapping) else ():
        yield str(name), below if isinstance(below, Mapping) else {}
        yield from _arguments(below)
    yield from _arguments(schema.get("items"))


def _call_texts(call: Any) -> Iterator[str | tuple[str, ...]]:
    function = call.get("function", call)
    yield str(function.get("name", ""))
    yield from _leaves(arguments_value(function.get("arguments")))


def _leaves(value: Any) -> Iterator[str | tuple[str, ...]]:
    """Yield the names and values in arguments. Values other than text are in the forms of JSON and Python."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield str(key)
            yield from _leaves(below)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _leaves(below)
    elif isinstance(value, str):
        yield value
    elif value is not None:
        yield (json.dumps(value), str(value))


def _ids(message: Message) -> list[str]:
    calls = [call.get("id") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return [str(each) for each in (*calls, message.get("tool_call_id")) if each]


def _divided(message: Message) -> tuple[list[str], str]:
    """Return the reasoning texts of a message and the rest of its text."""
    content = message.get("content")
    said = content if isinstance(content, str) else ""
    if message.get("role") != "assistant":
        return [], said
    thought = [str(message[key]) for key in REASONING_KEYS if isinstance(message.get(key), str)]
    thought += texts_between(said, "<think>", "</think>")
    return thought, said.rpartition("</think>")[2]


def _holds(rendered: str, wanted: str | tuple[str, ...]) -> bool:
    """Return whether a rendered chat contains a text unchanged, as JSON, or line by line."""
    if isinstance(wanted, tuple):
        return any(_holds(rendered, each) for each in wanted)
    text = wanted.strip()
    if any(form in rendered for form in _forms(text)):
        return True
    lines = [line.strip() for line in text.splitlines()]
    return len(lines) > 1 and all(any(form in rendered for form in _forms(line)) for line in lines)


def _forms(text: str) -> Iterator[str]:
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


@lru_cache(maxsize=256)
def _report_left_out(tokenizer: str, task: str | None, what: str, kind: str) -> None:
    logger.warning(
        "Rows of %s: the chat template of %s leaves out %s; it is not trained on. data.template_may_leave_out allows "
        "it (%s).",
        task or "the data",
        tokenizer,
        what,
        kind,
    )


@lru_cache(maxsize=256)
def _report_unused(tokenizer: str, task: str | None, key: str) -> None:
    logger.warning(
        "Rows of %s: messages have the key %r, which neither the chat template of %s nor the loss reads.",
        task or "the data",
        key,
        tokenizer,
    )
