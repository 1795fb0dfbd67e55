"""Items of the Responses API, and the messages of a conversation that they stand for.

One message of the model is several items: its reasoning, its text, and each of its calls. Invariant: the items that
`items_of` writes for an answer are read as one message that equals `CallAnswer.message`.
"""

from collections.abc import Sequence
from typing import Any

from nemo_rl.data.interfaces import Message
from nemo_rl.experience.agents.calls import CallAnswer
from nemo_rl.experience.agents.dialects.contents import SEPARATOR, part_text, required_text_of, tool_call
from nemo_rl.experience.agents.dialects.fields import Fields

type Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "refusal")
_REASONING_TEXTS = ("reasoning_text", "summary_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


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

    Such a message begins with reasoning, a text or a call, and ends before the next reasoning, before a text that
    follows a text or a call, and before a message or result of others.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._open: Message | None = None

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
        name = "content" if item.items("content") else "summary"
        texts = [part_text(part, _REASONING_TEXTS) for part in item.objects(name)]
        if self._open is not None:
            self._close()
        # Reasoning that is encrypted, of another model, has no text.
        self._reasoning += texts

    def _add_message(self, item: Fields) -> None:
        role = item.one_of("role", _ROLES)
        content = required_text_of(item, _TEXTS)
        if role == "assistant":
            if self._open is not None:
                self._close()
            self._opened()["content"] = content
            return
        self._close()
        self._messages.append({"role": "system" if role == "developer" else role, "content": content})

    def _add_call(self, item: Fields) -> None:
        arguments = item.required_text("arguments", may_be_empty=True)
        name = item.required_text("name", may_be_empty=True)
        call = tool_call(item.required_text("call_id"), name, arguments)
        self._opened().setdefault("tool_calls", []).append(call)

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
            self._open = None


def items_of(answer: CallAnswer) -> list[Item]:
    """Return the items of an answer: reasoning, text and calls.

    A text is left out if it is empty and there are calls.
    """
    items: list[Item] = []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if answer.reasoning is not None:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        base: Item = {"id": f"rs_{answer.id}", "type": "reasoning", "summary": []}
        items.append({**base, "content": [thought], "status": status})
    if answer.content or not answer.tool_calls:
        text: Item = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        base = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        items.append({**base, "content": [text], "status": status})
    items += [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }
        for call in answer.tool_calls
    ]
    return items


def empty_item(item: Item) -> Item:
    """Return an item as it is before its content is written."""
    empty: Sequence[Any] | str = "" if item["type"] == "function_call" else []
    return {**item, ("arguments" if item["type"] == "function_call" else "content"): empty, "status": "in_progress"}
