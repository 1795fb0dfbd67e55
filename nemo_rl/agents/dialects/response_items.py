"""Items of the Responses API, and the messages of a conversation that they stand for.

One message of the model is several items: its reasoning, its text, and each of its calls. Invariant: the items that
`items_of` writes for an answer are read as one message that equals `CallAnswer.message`.
"""

import re
from collections.abc import Sequence
from typing import Any

from nemo_rl.agents.dialects.contents import SEPARATOR, part_text, required_text_of, tool_call
from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.endpoint.calls import CallAnswer
from nemo_rl.data.interfaces import Message

type Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "refusal")
_REASONING_TEXTS = ("reasoning_text", "summary_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_(.+)_\d+")
"""Matches the `id` of an item that `items_of` has written: the answer's id, and the place of the item in it."""


def read_items(fields: Fields) -> list[Message]:
    """Read the field `input`: a text of the user, or items.

    Raises:
        CallError: it is missing, or an item is wrong or not supported.
    """
    if isinstance(fields.values.get("input"), str):
        return [{"role": "user", "content": fields.text("input")}]
    if not fields.has("input"):
        raise fields.wrong("input", "a text or a list of items")
    reader = _ItemReader()
    for item in fields.objects("input"):
        reader.add(item)
    return reader.finished()


class _ItemReader:
    """Joins the items of one message of the model.

    Items of one answer have its id in their own. Where a program has left it out, a message begins with reasoning, a
    text or a call, and ends before the next reasoning, before a text that follows a text or a call, and before a
    message or result of others.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._open: Message | None = None
        self._answer_id: str | None = None
        # The last message with calls that only results follow, with the id of its answer.
        self._called: tuple[str, Message] | None = None

    def add(self, item: Fields) -> None:
        """Read the next item.

        Raises:
            CallError: it is wrong or not supported.
        """
        kind = item.text("type") or "message"
        if kind not in _KINDS:
            raise item.unsupported("type", f"Give items of type {', '.join(_KINDS)}, with their content.")
        if kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            self._add_call(item)
        elif kind == "function_call_output":
            self._close()
            output = required_text_of(item, _TEXTS, "output")
            message = {"role": "tool", "content": output, "tool_call_id": item.required_text("call_id")}
            self._messages.append(message)
        else:
            self._add_message(item)

    def finished(self) -> list[Message]:
        """Return the messages of all items."""
        self._close()
        return self._messages

    def _add_reasoning(self, item: Fields) -> None:
        if self._open is not None:
            self._close()
        self._begin(item)
        name = "content" if item.items("content") else "summary"
        # Reasoning that is encrypted, of another model, has no text.
        self._reasoning += [part_text(part, _REASONING_TEXTS) for part in item.objects(name)]

    def _add_message(self, item: Fields) -> None:
        role = item.one_of("role", _ROLES)
        content = required_text_of(item, _TEXTS)
        if role == "assistant":
            if self._open is not None:
                self._close()
            self._begin(item)
            self._opened()["content"] = content
            return
        self._close()
        self._called = None
        self._messages.append({"role": role, "content": content})

    def _add_call(self, item: Fields) -> None:
        arguments = item.required_text("arguments", may_be_empty=True)
        name = item.required_text("name", may_be_empty=True)
        call = tool_call(item.required_text("call_id"), name, arguments)
        answer_id = _answer_id(item)
        # Some programs put the result of each call right after the call.
        if self._open is None and self._called is not None and self._called[0] == answer_id:
            self._called[1]["tool_calls"].append(call)
            return
        self._begin(item)
        self._opened().setdefault("tool_calls", []).append(call)

    def _begin(self, item: Fields) -> None:
        """End the message of another answer than the item's."""
        answer_id = _answer_id(item)
        if answer_id is not None and self._answer_id not in (None, answer_id):
            self._close()
        self._answer_id = answer_id or self._answer_id

    def _opened(self) -> Message:
        """Return the model's message that items are added to."""
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            if self._reasoning:
                self._open["reasoning_content"] = SEPARATOR.join(self._reasoning)
                self._reasoning = []
        return self._open

    def _close(self) -> None:
        """End the model's message, which may have only reasoning."""
        if self._reasoning:
            self._opened()
        if self._open is not None:
            self._messages.append(self._open)
            has_calls = self._answer_id is not None and "tool_calls" in self._open
            self._called = (self._answer_id or "", self._open) if has_calls else None
            self._open = None
        self._answer_id = None


def _answer_id(item: Fields) -> str | None:
    """Return the id of the answer that an item is of; None if it is not one of the endpoint's."""
    match = _ITEM_ID.fullmatch(item.text("id") or "")
    return None if match is None else match.group(1)


def items_of(answer: CallAnswer) -> list[Item]:
    """Return the items of an answer: reasoning, text and calls.

    A text is left out if it is empty and there are calls.
    """
    items: list[Item] = []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if answer.reasoning is not None:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        base: Item = {"id": f"rs_{answer.id}_0", "type": "reasoning", "summary": []}
        items.append({**base, "content": [thought], "status": status})
    if answer.content or not answer.tool_calls:
        text: Item = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        base = {"id": f"msg_{answer.id}_{len(items)}", "type": "message", "role": "assistant"}
        items.append({**base, "content": [text], "status": status})
    items += [
        {
            "id": f"fc_{answer.id}_{place}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }
        for place, call in enumerate(answer.tool_calls, len(items))
    ]
    return items


def empty_item(item: Item) -> Item:
    """Return an item as it is before its content is written."""
    empty: Sequence[Any] | str = "" if item["type"] == "function_call" else []
    return {**item, ("arguments" if item["type"] == "function_call" else "content"): empty, "status": "in_progress"}
