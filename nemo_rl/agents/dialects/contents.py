"""Read the content of a message: a text, or a list of parts, each with a type.

Invariant: only texts are read. An image, a sound or a document raises a `CallError`, because leaving it out would
change the conversation.
"""

from collections.abc import Collection, Iterator
from typing import Any

from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.endpoint.calls import CallError

SEPARATOR = "\n"
"""Stands between the text parts of a message, as in vLLM."""


def parts_of(message: Fields, text_type: str, name: str = "content") -> Iterator[Fields]:
    """Return the parts of a content; a text is one part, and a content that is left out has none.

    Args:
        message: the object that has the content.
        text_type: type of the part that a text stands for.
        name: field of the content.

    Raises:
        CallError: the content is neither a text nor a list of objects.
    """
    content = message.values.get(name)
    if isinstance(content, str):
        yield Fields({"type": text_type, "text": message.text(name)}, message.name_of(name))
    elif content is None or isinstance(content, list):
        yield from message.objects(name)
    else:
        raise message.wrong(name, "a text or a list of text parts")


def text_of(message: Fields, text_types: Collection[str], name: str = "content") -> str:
    """Return the joined texts of a content.

    Args:
        message: the object that has the content.
        text_types: types of parts that are texts, the first for a content that is a text itself.
        name: field of the content.

    Raises:
        CallError: the content has other parts.
    """
    parts = parts_of(message, next(iter(text_types)), name)
    return SEPARATOR.join(part_text(part, text_types) for part in parts)


def required_text_of(message: Fields, text_types: Collection[str], name: str = "content") -> str:
    """Return the joined texts of a content that has to be given.

    Raises:
        CallError: it is missing, or has other parts.
    """
    if not message.has(name):
        raise message.wrong(name, "a text or a list of text parts")
    return text_of(message, text_types, name)


def part_text(part: Fields, text_types: Collection[str]) -> str:
    """Return the text of a part.

    Raises:
        CallError: it is no text.
    """
    kind = part.required_text("type")
    if kind not in text_types:
        raise not_a_text(part, text_types)
    # A refusal, which OpenAI's models write in place of a text, is a part of its own.
    return part.required_text("refusal" if kind == "refusal" else "text", may_be_empty=True)


def not_a_text(part: Fields, text_types: Collection[str]) -> CallError:
    """Return an error that a part is not one that can be read."""
    return part.unsupported("type", f"The policy reads texts only: give parts of type {' or '.join(text_types)}.")


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of `CallAnswer.message`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
