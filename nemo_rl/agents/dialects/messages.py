"""Anthropic's Messages API, `/v1/messages`.

Differences to Anthropic's own servers: `max_tokens` has no upper limit, `thinking` and its budget are ignored (the
chat template decides whether the policy reasons, see `chat_template_kwargs`), `is_error` of a tool's result is not
shown to the policy, and consecutive messages of one role stay separate messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.dialects.interface import Body, Event, SessionMemory
from nemo_rl.agents.dialects.message_blocks import block_deltas, blocks_of, empty_block, read_messages, read_system
from nemo_rl.agents.dialects.openai_form import prompt_token_ids, token_ids
from nemo_rl.agents.dialects.sampling import sampling_fields
from nemo_rl.agents.dialects.tools import schema_tools, tool_choice
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest
from nemo_rl.data.interfaces import Message

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
    """The dialect of Anthropic's Messages API. See `Dialect`."""

    path = "/v1/messages"

    def read(self, body: Body, memory: SessionMemory) -> CallRequest:
        """See `Dialect.read`."""
        fields = Fields(body)
        _refuse_unsupported(fields)
        if not fields.has("max_tokens"):
            raise fields.wrong("max_tokens", "an integer of at least 1")
        messages = [*read_system(fields), *read_messages(fields)]
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
        """See `Dialect.response`."""
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
        """See `Dialect.events`."""
        message = self.response(body, request, answers, memory)
        for data in _stream(message):
            yield Event(data, data["type"])

    def error(self, error: CallError) -> Mapping[str, Any]:
        """See `Dialect.error`."""
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
    """Return the numbers of tokens; those of the input do not count cached ones."""
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_tokens,
    }


def _stream(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the data of the events that write a message."""
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
