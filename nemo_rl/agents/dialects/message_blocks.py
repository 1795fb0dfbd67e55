"""Content blocks of the Messages API, and the messages of a conversation that they stand for.

Invariant: the blocks that `blocks_of` writes for an answer are read as one message that equals `CallAnswer.message`,
with arguments of calls that are equal as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.contents import SEPARATOR, not_a_text, parts_of, text_of, tool_call
from nemo_rl.agents.dialects.fields import Fields, is_json
from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallAnswer
from nemo_rl.data.interfaces import Message

type Block = dict[str, Any]

UNPARSED = "unparsed_arguments"
"""Key of a call's input if the model's arguments are no JSON object, which the API has no place for.

Its value is the text of the arguments; reading such an input gives this text again.
"""

SIGNATURE = "unsigned"
"""Signature of reasoning. It is not empty because some programs send back only reasoning that has one."""

_TEXTS = ("text",)
_ROLES = ("user", "assistant", "system")


def read_system(fields: Fields) -> list[Message]:
    """Read the field `system`.

    Raises:
        CallError: it is neither a text nor a list of text blocks.
    """
    text = text_of(fields, _TEXTS, "system")
    return [{"role": "system", "content": text}] if text else []


def read_messages(fields: Fields) -> list[Message]:
    """Read the field `messages`.

    Raises:
        CallError: it is missing or empty, or a message is wrong.
    """
    messages: list[Message] = []
    for each in fields.objects("messages"):
        role = each.one_of("role", _ROLES)
        if not each.has("content"):
            raise each.wrong("content", "a text or a list of content blocks")
        if role == "assistant":
            messages.append(_read_answer(each))
        elif role == "user":
            messages += _read_user(each)
        else:
            messages.append({"role": role, "content": text_of(each, _TEXTS)})
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def _read_user(fields: Fields) -> list[Message]:
    """Return a message for each result of a tool, and one for the texts if there are any or no results."""
    results: list[Message] = []
    texts: list[str] = []
    for block in parts_of(fields, "text"):
        kind = block.required_text("type")
        if kind == "tool_result":
            tool_call_id = block.required_text("tool_use_id")
            results.append({"role": "tool", "content": text_of(block, _TEXTS), "tool_call_id": tool_call_id})
        elif kind == "text":
            texts.append(block.required_text("text", may_be_empty=True))
        else:
            raise not_a_text(block, ("text", "tool_result"))
    if texts or not results:
        return [*results, {"role": "user", "content": SEPARATOR.join(texts)}]
    return results


def _read_answer(fields: Fields) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for block in parts_of(fields, "text"):
        kind = block.required_text("type")
        if kind == "text":
            texts.append(block.required_text("text", may_be_empty=True))
        elif kind == "thinking":
            thoughts.append(block.required_text("thinking", may_be_empty=True))
        elif kind == "tool_use":
            calls.append(_read_call(block))
        else:
            raise not_a_text(block, ("text", "thinking", "tool_use"))
    message: Message = {"role": "assistant", "content": SEPARATOR.join(texts)}
    if thoughts:
        message["reasoning_content"] = SEPARATOR.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(block: Fields) -> Message:
    given = block.json_object("input")
    if given is None:
        raise block.wrong("input", "an object")
    name = block.required_text("name", may_be_empty=True)
    return tool_call(block.required_text("id"), name, _arguments_of(given))


def blocks_of(answer: CallAnswer) -> list[Block]:
    """Return the blocks of an answer: reasoning, text and calls. An empty text has none."""
    blocks: list[Block] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)} for call in answer.tool_calls
    ]
    return blocks


def _input_of(call: AnsweredToolCall) -> Mapping[str, Any]:
    """Return the arguments of a call as an object; see `UNPARSED` for those that are none."""
    parsed = _parsed(call.arguments)
    # An object of the model that looks like the one of a text is written as a text too, to be read as it was.
    return {UNPARSED: call.arguments} if parsed is None or _is_unparsed(parsed) else parsed


def _arguments_of(given: Mapping[str, Any]) -> str:
    """Return the arguments of an input as text."""
    return str(given[UNPARSED]) if _is_unparsed(given) else json.dumps(given, ensure_ascii=False)


def _is_unparsed(given: Mapping[str, Any]) -> bool:
    return len(given) == 1 and isinstance(given.get(UNPARSED), str)


def _parsed(arguments: str) -> Mapping[str, Any] | None:
    """Return the object of a JSON text; None if it is another value, or JSON cannot write it again."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_json(value) else None


def empty_block(block: Block) -> Block:
    """Return a block as it is before its content is streamed."""
    empty: Mapping[str, Mapping[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    return {**block, **empty[block["type"]]}


def block_deltas(block: Block) -> Sequence[Block]:
    """Return the changes that make the block of an empty one."""
    if block["type"] == "thinking":
        return (
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        )
    if block["type"] == "text":
        return ({"type": "text_delta", "text": block["text"]},)
    return ({"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)},)
