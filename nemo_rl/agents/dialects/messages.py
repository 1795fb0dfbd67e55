"""Translate Anthropic's Messages API, `/v1/messages`.

The endpoint differs from Anthropic's own servers. `max_tokens` has no upper limit. `thinking` and its budget are
ignored, because the chat template decides whether the policy reasons (`chat_template_kwargs`). The policy does not
see `is_error` of a tool's result, and consecutive messages of one role stay separate messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.fields import SEPARATOR, Fields, is_json, not_a_text, parts_of, text_of, tool_call
from nemo_rl.agents.dialects.images import Contents, ImageReader, joined
from nemo_rl.agents.dialects.interface import Body, Event, SessionMemory
from nemo_rl.agents.dialects.openai_form import prompt_token_ids, token_ids
from nemo_rl.agents.dialects.sampling import sampling_fields
from nemo_rl.agents.dialects.tools import schema_tools, tool_choice
from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallAnswer, CallError, CallRequest
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import ImagePart, TextPart

type Block = dict[str, Any]

UNPARSED = "unparsed_arguments"
"""Key of a call's input if the model's arguments are not a JSON object, which the API cannot represent.

The value of the key is the text of the arguments. Reading such an input returns this text."""

SIGNATURE = "unsigned"
"""Signature of reasoning. It is not empty, because some programs send reasoning back only if it has a signature."""

_TEXTS = ("text",)
_ROLES = ("user", "assistant", "system")


def read_system(fields: Fields) -> list[Message]:
    """Read the field `system`.

    Raises:
        CallError: the field is neither a text nor a list of text blocks.
    """
    text = text_of(fields, _TEXTS, "system")
    return [{"role": "system", "content": text}] if text else []


def _read_image(block: Fields, images: ImageReader) -> ImagePart:
    """Read a block `{"type": "image", "source": ...}`, with the image as base64 or its address."""
    source = block.object("source")
    if source is None:
        raise block.wrong("source", "an object with type, media_type and data")
    if source.one_of("type", ("base64", "url", "file")) == "file":
        raise source.unsupported("type", 'Give the image itself in a source of type "base64".')
    if source.values["type"] == "url":
        return images.read(source.required_text("url"), source, "url")
    if source.has("media_type") and not source.required_text("media_type").startswith("image/"):
        raise source.wrong("media_type", "the type of an image, such as image/png")
    return images.read(f"data:image;base64,{source.required_text('data')}", source, "data")


_CONTENTS = Contents(_TEXTS, {"image": _read_image})


def read_messages(fields: Fields, images: ImageReader | None = None) -> list[Message]:
    """Read the field `messages`.

    Args:
        images: reads the images of the messages. None for a policy that reads text only.

    Raises:
        CallError: the field is missing or empty, or a message is wrong.
    """
    messages: list[Message] = []
    reader = images or ImageReader()
    for each in fields.objects("messages"):
        role = each.one_of("role", _ROLES)
        if not each.has("content"):
            raise each.wrong("content", "a text or a list of content blocks")
        if role == "assistant":
            messages.append(_read_answer(each))
        elif role == "user":
            messages += _read_user(each, reader)
        else:
            messages.append({"role": role, "content": text_of(each, _TEXTS)})
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def _read_user(fields: Fields, images: ImageReader) -> list[Message]:
    """Return a message for each result of a tool, and one with all other blocks if there are any, or no results."""
    results: list[Message] = []
    others: list[TextPart | ImagePart] = []
    for block in parts_of(fields, "text"):
        kind = block.required_text("type")
        if kind == "tool_result":
            tool_call_id = block.required_text("tool_use_id")
            content = _CONTENTS.read(block, images)
            results.append({"role": "tool", "content": content, "tool_call_id": tool_call_id})
        elif kind == "text" or (kind == "image" and images.limits is not None):
            others.append(_CONTENTS.part(block, images))
        else:
            raise not_a_text(block, ("text", "tool_result"), () if images.limits is None else ("image",))
    if others or not results:
        return [*results, {"role": "user", "content": joined(others)}]
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
    """Return the blocks of an answer: reasoning, text and calls. An empty text has no block."""
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
    """Return the arguments of a call as an object, or an object with only `UNPARSED` if they cannot be parsed."""
    parsed = _parsed(call.arguments)
    # An object of the model that itself looks like `UNPARSED` is also kept as text, so that it is read back unchanged.
    return {UNPARSED: call.arguments} if parsed is None or _is_unparsed(parsed) else parsed


def _arguments_of(given: Mapping[str, Any]) -> str:
    """Return the arguments in the input of a call as text."""
    return str(given[UNPARSED]) if _is_unparsed(given) else json.dumps(given, ensure_ascii=False)


def _is_unparsed(given: Mapping[str, Any]) -> bool:
    return len(given) == 1 and isinstance(given.get(UNPARSED), str)


def _parsed(arguments: str) -> Mapping[str, Any] | None:
    """Return the object of a JSON text, or None if it is not an object or has values that JSON does not allow."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_json(value) else None


def empty_block(block: Block) -> Block:
    """Return a block without content, to be streamed before the content."""
    empty: Mapping[str, Mapping[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    return {**block, **empty[block["type"]]}


def block_deltas(block: Block) -> Sequence[Block]:
    """Return the changes that turn the empty block into the block."""
    if block["type"] == "thinking":
        return (
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        )
    if block["type"] == "text":
        return ({"type": "text_delta", "text": block["text"]},)
    return ({"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)},)


_UNSUPPORTED: Mapping[str, Sequence[Any]] = {"container": (), "mcp_servers": ([],), "n": (1,)}
_KEEPS_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Messages:
    """Dialect of Anthropic's Messages API."""

    path = "/v1/messages"

    def read(self, body: Body, memory: SessionMemory, images: ImageReader | None = None) -> CallRequest:
        """Read a request in this form (`Dialect.read`)."""
        fields = Fields(body)
        _refuse_unsupported(fields)
        if not fields.has("max_tokens"):
            raise fields.wrong("max_tokens", "an integer of at least 1")
        messages = [*read_system(fields), *read_messages(fields, images)]
        tools = schema_tools(fields)
        return CallRequest(
            messages=messages,
            tools=tools,
            **tool_choice(fields, tools),
            continues_last=_continues_last(fields, messages),
            **sampling_fields(
                fields,
                ("max_tokens",),
                "stop_sequences",
                ((fields.object("output_config"), "format"), (fields, "output_format")),
            ),
        )

    def response(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Mapping[str, Any]:
        """Return the response to a request (`Dialect.response`)."""
        (answer,) = answers
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or "",
            "content": blocks_of(answer),
            **_stop(answer),
            "usage": _usage(answer),
            **prompt_token_ids(body, answers),
            **token_ids(body, answer),
        }

    def events(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Iterator[Event]:
        """Yield the events of a streamed response (`Dialect.events`)."""
        message = self.response(body, request, answers, memory)
        for data in _stream(message):
            yield Event(data, data["type"])

    def error(self, error: CallError) -> Mapping[str, Any]:
        """Return the body of an error (`Dialect.error`)."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = _ERROR_TYPES.get(error.status, default)
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _refuse_unsupported(fields: Fields) -> None:
    fields.refuse(_UNSUPPORTED)
    management = fields.object("context_management")
    if management is not None:
        for edit in management.items("edits"):
            if edit != _KEEPS_ALL_THINKING:
                raise management.unsupported("edits", "Send the conversation as the policy shall read it.")


def _continues_last(fields: Fields, messages: Sequence[Message]) -> bool:
    last = messages[-1]
    if "tool_calls" in last:
        raise fields.wrong("messages", "a list whose last message has no tool_use, or is followed by its tool_result")
    return bool(last["role"] == "assistant")


def _stop(answer: CallAnswer) -> Mapping[str, Any]:
    if answer.finish_reason == "length":
        reason = "max_tokens"
    elif answer.finish_reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string if reason == "stop_sequence" else None}


def _usage(answer: CallAnswer) -> dict[str, Any]:
    """Return the numbers of tokens. Cached tokens do not count as input tokens."""
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_tokens,
    }


def _stream(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the data of the events that stream a message."""
    unfinished: Mapping[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = message["usage"]
    start = {**message, **unfinished, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": empty_block(block)}
        for delta in block_deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stop, "usage": usage}
    yield {"type": "message_stop"}
