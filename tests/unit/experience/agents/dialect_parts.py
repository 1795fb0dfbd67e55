"""Canned answers, and an app that serves one dialect with them, for clients of OpenAI and Anthropic."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl.agents.dialects.interface import Dialect, Event
from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallAnswer, CallError, CallRequest

WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER_SCHEMA}
CALL = AnsweredToolCall("call_0", "weather", '{"city": "Köln"}')
SECOND_CALL = AnsweredToolCall("call_1", "weather", "{}")


def answer(content: str = "Hi!", **changes: Any) -> CallAnswer:
    values: dict[str, Any] = {
        "id": "7",
        "reasoning": None,
        "tool_calls": (),
        "finish_reason": "stop",
        "stop_string": None,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "token_texts": ["Hi", "!"],
        "num_cached_tokens": 2,
    }
    return CallAnswer(content=content, **(values | changes))


def answer_with_calls(content: str = "", **changes: Any) -> CallAnswer:
    return answer(content, **({"tool_calls": [CALL, SECOND_CALL], "finish_reason": "tool_calls"} | changes))


def _argument_texts() -> st.SearchStrategy[str]:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
    return st.one_of(
        values.map(json.dumps),
        st.dictionaries(st.text(max_size=5), values, max_size=3).map(json.dumps),
        st.sampled_from(["", "{", '{"a": 1e999}', '{"a": "\\ud800"}', '{"unparsed_arguments": "{"}', "[" * 5000]),
        st.text(),
    )


TEXTS = st.text(max_size=20) | st.sampled_from(["", "\n\n", " x "])
CALLS = st.builds(AnsweredToolCall, id=st.text(min_size=1, max_size=8), name=st.text(), arguments=_argument_texts())


@st.composite
def answers(draw: Callable[..., Any]) -> CallAnswer:
    calls = draw(st.lists(CALLS, max_size=3))
    end = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    return answer(
        draw(TEXTS), id=draw(st.uuids()).hex, reasoning=draw(st.none() | TEXTS), tool_calls=calls, finish_reason=end
    )


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with parsed arguments where they are JSON."""
    calls = [
        call | {"function": call["function"] | {"arguments": _parsed(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls}


def _parsed(text: str) -> str:
    try:
        return "JSON: " + json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


class App:
    """An app that answers each request with the next canned answers.

    Attributes:
        requests: what the dialect has read.
        memory: of the one session.
    """

    def __init__(self, dialect: Dialect, *canned: Sequence[CallAnswer] | CallError) -> None:
        self._dialect = dialect
        self._canned = iter(canned)
        self.requests: list[CallRequest] = []
        self.memory: dict[str, Any] = {}
        self.asgi = Starlette(routes=[Route(dialect.path, self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        try:
            call = self._dialect.read(body, self.memory)
            self.requests.append(call)
            found = next(self._canned)
            if isinstance(found, CallError):
                raise found
        except CallError as error:
            return JSONResponse(self._dialect.error(error), error.status)
        if body.get("stream"):
            events = self._dialect.events(body, call, found, self.memory)
            return Response("".join(_lines(events)), media_type="text/event-stream")
        return JSONResponse(self._dialect.response(body, call, found, self.memory))


def _lines(events: Iterator[Event]) -> Iterator[str]:
    for event in events:
        name = "" if event.name is None else f"event: {event.name}\n"
        data = event.data if isinstance(event.data, str) else json.dumps(event.data)
        yield f"{name}data: {data}\n\n"
