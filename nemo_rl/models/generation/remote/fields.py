"""The JSON of a request for a chat completion.

Invariant: only fields that every server knows are sent, and others where the configuration asks for them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.observations import template_message
from nemo_rl.data.messages.template_form import known_role
from nemo_rl.models.generation.interfaces import GenerationRequest, Grammar, SamplingParams
from nemo_rl.models.generation.remote.chats import ChatInput

_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Fields of messages that servers know."""


def chat_body(config: ModelEndpointConfig, request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of a request; a field that `extra_body` sets to null is left out.

    Args:
        config: the section.
        request: has `chat`.

    Raises:
        DataError: a message has content that is not text.
    """
    chat = request.chat
    assert chat is not None, "rollouts give it to models that read chats"
    body = {
        "model": config.model,
        "messages": list(wire_messages(chat.messages)),
        "seed": request.seed,
        **_sampling(request.sampling),
        **_around(chat),
    }
    body |= config.extra_body
    return {name: value for name, value in body.items() if name not in config.extra_body or value is not None}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    optional = {
        "stop": list(sampling.stop_strings),
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "bad_words": list(sampling.bad_words),
        **_form(sampling.grammar),
    }
    return fields | {name: value for name, value in optional.items() if value}


def _form(grammar: Grammar | None) -> dict[str, Any]:
    """Return the field for the form of an answer: OpenAI's for JSON, and vLLM's for the forms that OpenAI lacks."""
    if grammar is None:
        return {}
    kind, definition = grammar
    if kind != "json":
        return {"structured_outputs": {kind: json.loads(definition) if kind == "choice" else definition}}
    schema = {"name": "answer", "schema": json.loads(definition)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _around(chat: ChatInput) -> dict[str, Any]:
    """Return what a conversation has besides its messages."""
    fields: dict[str, Any] = {}
    if chat.tools:
        fields["tools"] = [dict(tool) for tool in chat.tools]
        if not chat.may_call:
            fields["tool_choice"] = "none"
        if chat.forced_tool is not None:
            named = {"type": "function", "function": {"name": chat.forced_tool}}
            fields["tool_choice"] = named if chat.forced_tool else "required"
            if chat.calls_once:
                fields["parallel_tool_calls"] = False
    if chat.template_kwargs:
        fields["chat_template_kwargs"] = dict(chat.template_kwargs)
    return fields


def wire_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages as servers expect them.

    Roles that servers do not know become "user", arguments of tool calls are JSON text, each call has an id, and
    answers of tools without an id get those of the calls before them, in order.

    Raises:
        DataError: the content of a message is not text.
    """
    open_ids: list[str] = []
    for number, message in enumerate(messages):
        known = template_message({**message, "content": message.get("content") or ""})
        known = {name: known[name] for name in _KEPT if known.get(name) is not None}
        known["role"] = known_role(known["role"], knows_developer=False)
        if known.get("tool_calls"):
            known["tool_calls"] = [_call(call, f"call_{number}_{n}") for n, call in enumerate(known["tool_calls"])]
            open_ids = [call["id"] for call in known["tool_calls"]]
            known["content"] = known["content"] or None
        elif known["role"] == "tool":
            if "tool_call_id" not in known and open_ids:
                known["tool_call_id"] = open_ids.pop(0)
        else:
            open_ids = []
        yield known


def _call(call: Mapping[str, Any], fallback_id: str) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call.get("id") or fallback_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }
