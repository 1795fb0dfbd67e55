"""Translate OpenAI's Responses API, `/v1/responses`.

The session's memory keeps the conversation of each response under the response's id, without the instructions, unless
the request has `"store": false`. A request with this id as `previous_response_id` continues the conversation.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.fields import SEPARATOR, Fields, part_text, required_text_of, tool_call
from nemo_rl.agents.dialects.images import Contents, ImageReader, check_detail
from nemo_rl.agents.dialects.interface import Body, Event, SessionMemory
from nemo_rl.agents.dialects.openai_form import error_body, exact_tokens, prompt_token_ids, token_ids
from nemo_rl.agents.dialects.sampling import sampling_fields
from nemo_rl.agents.dialects.tools import flat_tools, tool_choice
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import ImagePart

type Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "refusal")
_REASONING_TEXTS = ("reasoning_text", "summary_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_(.+)_\d+")
"""Pattern of the `id` of an item that `items_of` has made: the answer's id, and the index of the item in the answer."""


def _read_image(part: Fields, images: ImageReader) -> ImagePart:
    """Read a part `{"type": "input_image", "image_url": ...}`."""
    if part.has("file_id"):
        raise part.unsupported("file_id", "Give the image itself as a data: address in image_url.")
    check_detail(part)
    return images.read(part.required_text("image_url"), part, "image_url")


_CONTENTS = Contents(_TEXTS, {"input_image": _read_image})


def read_items(fields: Fields, images: ImageReader | None = None) -> list[Message]:
    """Read the field `input`: a text of the user, or items.

    Args:
        images: reads the images of the items. None for a policy that reads text only.

    Raises:
        CallError: the field is missing, or an item is wrong or not supported.
    """
    if isinstance(fields.values.get("input"), str):
        return [{"role": "user", "content": fields.text("input")}]
    if not fields.has("input"):
        raise fields.wrong("input", "a text or a list of items")
    reader = _ItemReader(images or ImageReader())
    for item in fields.objects("input"):
        reader.add(item)
    return reader.finished()


class _ItemReader:
    """Read items, and join those of one answer of the model to one message.

    Items of one answer have the answer's id in their own ids. If a program has left the ids out, a message begins with
    reasoning, a text or a call. It ends before the next reasoning, before a text that follows a text or a call, and
    before a tool's result or a message of another role.
    """

    def __init__(self, images: ImageReader) -> None:
        self._images = images
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._open: Message | None = None
        self._answer_id: str | None = None
        # The last message with calls, as long as only results follow it, with the id of its answer.
        self._called: tuple[str, Message] | None = None

    def add(self, item: Fields) -> None:
        """Read the next item."""
        kind = item.text("type") or "message"
        if kind not in _KINDS:
            raise item.unsupported("type", f"Give items of type {', '.join(_KINDS)}, with their content.")
        if kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            self._add_call(item)
        elif kind == "function_call_output":
            self._close()
            output = _CONTENTS.required(item, self._images, "output")
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
        # Encrypted reasoning, which comes from another model, has no text.
        self._reasoning += [part_text(part, _REASONING_TEXTS) for part in item.objects(name)]

    def _add_message(self, item: Fields) -> None:
        role = item.one_of("role", _ROLES)
        if role == "assistant":
            content = required_text_of(item, _TEXTS)
            if self._open is not None:
                self._close()
            self._begin(item)
            self._opened()["content"] = content
            return
        self._close()
        self._called = None
        self._messages.append({"role": role, "content": _CONTENTS.required(item, self._images)})

    def _add_call(self, item: Fields) -> None:
        arguments = item.required_text("arguments", may_be_empty=True)
        name = item.required_text("name", may_be_empty=True)
        call = tool_call(item.required_text("call_id"), name, arguments)
        answer_id = _answer_id(item)
        # Some programs put the result of each call directly after the call.
        if self._open is None and self._called is not None and self._called[0] == answer_id:
            self._called[1]["tool_calls"].append(call)
            return
        self._begin(item)
        self._opened().setdefault("tool_calls", []).append(call)

    def _begin(self, item: Fields) -> None:
        """End the current message if the item belongs to another answer."""
        answer_id = _answer_id(item)
        if answer_id is not None and self._answer_id not in (None, answer_id):
            self._close()
        self._answer_id = answer_id or self._answer_id

    def _opened(self) -> Message:
        """Return the current message of the model, to which items are added."""
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            if self._reasoning:
                self._open["reasoning_content"] = SEPARATOR.join(self._reasoning)
                self._reasoning = []
        return self._open

    def _close(self) -> None:
        """End the current message of the model, which may have only reasoning."""
        if self._reasoning:
            self._opened()
        if self._open is not None:
            self._messages.append(self._open)
            has_calls = self._answer_id is not None and "tool_calls" in self._open
            self._called = (self._answer_id or "", self._open) if has_calls else None
            self._open = None
        self._answer_id = None


def _answer_id(item: Fields) -> str | None:
    """Return the id of the answer to which an item belongs, or None if the endpoint did not make the item's id."""
    match = _ITEM_ID.fullmatch(item.text("id") or "")
    return None if match is None else match.group(1)


def items_of(answer: CallAnswer) -> list[Item]:
    """Return the items of an answer: reasoning, text and calls.

    An empty text is left out if there are calls.
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
    """Return an item without its content, which is sent before the content."""
    empty: Sequence[Any] | str = "" if item["type"] == "function_call" else []
    return {**item, ("arguments" if item["type"] == "function_call" else "content"): empty, "status": "in_progress"}


_STORED = "responses"
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "n": (1,),
    "prompt": (),
    "truncation": ("disabled",),
}
_LOGPROBS = "message.output_text.logprobs"


class Responses:
    """Dialect of OpenAI's Responses API."""

    path = "/v1/responses"

    def read(self, body: Body, memory: SessionMemory, images: ImageReader | None = None) -> CallRequest:
        """Read a request in this form (`Dialect.read`).

        Raises:
            CallError: also with status 404 if the session has no response with the id `previous_response_id`.
        """
        fields = Fields(body)
        _refuse_unsupported(fields)
        fields.flag("store")
        messages = [*_instructions(fields), *_earlier(fields, memory), *read_items(fields, images)]
        if not messages:
            raise fields.wrong("input", "a text or a list of at least one item")
        tools = flat_tools(fields)
        return CallRequest(
            messages=messages,
            tools=tools,
            **tool_choice(fields, tools),
            **sampling_fields(fields, ("max_output_tokens",), own_forms=((fields.object("text"), "format"),)),
        )

    def response(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Mapping[str, Any]:
        """Return the response to a request (`Dialect.response`)."""
        (answer,) = answers
        response = _response(body, request, answer)
        if body.get("store") is not False:
            own = request.messages[1:] if body.get("instructions") else request.messages
            memory.setdefault(_STORED, {})[response["id"]] = (*own, answer.message)
        return response

    def events(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Iterator[Event]:
        """Yield the events of a streamed response (`Dialect.events`)."""
        yield from _stream_events(dict(self.response(body, request, answers, memory)))

    def error(self, error: CallError) -> Mapping[str, Any]:
        """Return the body of an error (`Dialect.error`)."""
        return error_body(error)


def _refuse_unsupported(fields: Fields) -> None:
    fields.refuse(_UNSUPPORTED)
    if _LOGPROBS in fields.items("include"):
        raise fields.unsupported("include", "Use /v1/chat/completions with logprobs.")


def _instructions(fields: Fields) -> list[Message]:
    text = fields.text("instructions")
    return [{"role": "system", "content": text}] if text else []


def _earlier(fields: Fields, memory: SessionMemory) -> Sequence[Message]:
    """Return the conversation that `previous_response_id` names."""
    name = "previous_response_id"
    response_id = fields.text(name)
    if response_id is None:
        return ()
    stored = memory.get(_STORED, {}).get(response_id)
    if stored is None:
        message = (
            f"{name}={response_id!r} is no response of this session that was stored. Give the id of one of its "
            'responses to a request without "store": false, or the whole conversation in input.'
        )
        raise CallError(404, message, "previous_response_not_found", name)
    return stored


def _response(body: Body, request: CallRequest, answer: CallAnswer) -> dict[str, Any]:
    """Return the response with its own fields, and the fields of the request that the API repeats."""
    is_cut = answer.finish_reason == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or "",
        "output": _output(body, answer),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": request.temperature,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [
            {"type": "function", "strict": False, "parameters": None, **each["function"]} for each in request.tools
        ],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": _usage(answer),
        **prompt_token_ids(body, [answer]),
        **token_ids(body, answer),
    }


def _output(body: Body, answer: CallAnswer) -> list[dict[str, Any]]:
    """Return the items of an answer. The last item has the tokens of the call if the request wants them."""
    *items, last = items_of(answer)
    return [*items, {**last, **exact_tokens(body, answer)}]


def _usage(answer: CallAnswer) -> Mapping[str, Any]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        # The tokens of the reasoning are not counted separately.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _stream_events(response: Item) -> Iterator[Event]:
    """Yield the events of a complete response, each with its `sequence_number`."""
    for number, data in enumerate(_response_events(response)):
        yield Event({**data, "sequence_number": number}, data["type"])


def _response_events(response: Item) -> Iterator[Item]:
    unfinished: Item = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": {**response, **unfinished}}
    yield {"type": "response.in_progress", "response": {**response, **unfinished}}
    for index, item in enumerate(response["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": empty_item(item)}
        yield from _content_events(item, {"item_id": item["id"], "output_index": index})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _content_events(item: Item, place: Item) -> Iterator[Item]:
    """Yield the events for the arguments of a call, or for each part of a content."""
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **place, "arguments": item["arguments"], "name": item["name"]}
        return
    for index, part in enumerate(item["content"]):
        at = {**place, "content_index": index}
        # Only events of an answer's text have this field.
        scores: Item = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        if part["text"]:
            yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **scores}
        yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **scores}
        yield {"type": "response.content_part.done", **at, "part": part}
