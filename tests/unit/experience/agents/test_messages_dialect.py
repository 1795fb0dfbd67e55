"""Anthropic's Messages API: responses and events against the types and the client of the package anthropic."""

import asyncio
import functools
import json

import pytest
from dialect_parts import CALL, WEATHER, WEATHER_SCHEMA, App, answer, answer_with_calls, comparable
from pydantic import TypeAdapter

from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallError
from nemo_rl.agents.endpoint.server import DIALECT_BY_PATH

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")

from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402

pytestmark = pytest.mark.fast

MESSAGES = DIALECT_BY_PATH["/v1/messages"]
TOOLS = [{"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER_SCHEMA}]
USER = {"role": "user", "content": "Hi"}
ASKED = {"model": "policy", "max_tokens": 5, "messages": [USER]}
ANSWERS = [
    answer(),
    answer(""),
    answer("Hi", reasoning="hm", finish_reason="length"),
    answer(stop_string="END"),
    answer_with_calls(),
    answer_with_calls("Let me look.", reasoning="hm"),
]
REASONS = ["end_turn", "end_turn", "max_tokens", "stop_sequence", "tool_use", "tool_use"]


def in_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def client(app: App):
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app.asgi))
    return anthropic.AsyncAnthropic(api_key="key", base_url="http://endpoint", http_client=http, max_retries=0)


def response(found, **changes):
    body = ASKED | changes
    return MESSAGES.response(body, MESSAGES.read(body, {}), [found], {})


def contents(found):
    """Return type and content of each block that an answer has."""
    blocks = [("thinking", found.reasoning)] if found.reasoning is not None else []
    blocks += [("text", found.content)] if found.content else []
    return blocks + [("tool_use", json.loads(call.arguments)) for call in found.tool_calls]


def contents_of(message):
    names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, names[block.type])) for block in message.content]


@pytest.mark.parametrize(("found", "reason"), list(zip(ANSWERS, REASONS, strict=True)))
def test_a_message_has_the_fields_of_anthropic(found, reason):
    got = Message.model_validate(response(found), strict=True)
    assert not got.model_extra and not any(block.model_extra for block in got.content)
    assert contents_of(got) == contents(found)
    assert (got.stop_reason, got.stop_sequence) == (reason, found.stop_string)
    assert (got.usage.input_tokens, got.usage.cache_read_input_tokens, got.usage.output_tokens) == (1, 2, 2)


def test_tokens_are_added_on_request():
    got = response(answer(), return_token_ids=True)
    assert (got["prompt_token_ids"], got["token_ids"]) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize("found", ANSWERS)
def test_events_are_those_of_anthropic_in_order(found):
    body = ASKED | {"stream": True}
    events = list(MESSAGES.events(body, MESSAGES.read(body, {}), [found], {}))
    assert [event.name for event in events] == [event.data["type"] for event in events]
    assert events.pop(1).name == "ping"
    read = [TypeAdapter(RawMessageStreamEvent).validate_python(event.data, strict=True) for event in events]
    assert not any(event.model_extra for event in read)
    expected = ["message_start"]
    for kind, _ in contents(found):
        deltas = ["content_block_delta"] * (2 if kind == "thinking" else 1)
        expected += ["content_block_start", *deltas, "content_block_stop"]
    assert [event.type for event in read] == [*expected, "message_delta", "message_stop"]
    assert (read[0].message.content, read[0].message.stop_reason) == ([], None)
    assert read[-2].usage.output_tokens == 2


@in_loop
@pytest.mark.parametrize(("found", "reason"), list(zip(ANSWERS, REASONS, strict=True)))
async def test_the_client_reads_a_message_and_a_stream(found, reason):
    async with client(App(MESSAGES, [found], [found])) as api:
        whole = await api.messages.create(**ASKED, tools=TOOLS)
        async with api.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for got in (whole, streamed):
        assert contents_of(got) == contents(found)
        assert (got.stop_reason, got.stop_sequence, got.usage.output_tokens) == (reason, found.stop_string, 2)
    assert whole.content == [type(block)(**block.model_dump()) for block in whole.content]


@in_loop
@pytest.mark.parametrize("arguments", ["{", "[]", '{"city":"Rome"}'])
async def test_the_clients_message_is_sent_back_as_it_is(arguments):
    found = answer_with_calls("Look", reasoning="hm", tool_calls=[AnsweredToolCall("call_0", "weather", arguments)])
    app = App(MESSAGES, [found], [found], [answer()], [answer()])
    result = {"type": "tool_result", "tool_use_id": CALL.id, "content": "sun", "is_error": False}
    async with client(app) as api:
        whole = await api.messages.create(**ASKED, system="Be brief.", tools=TOOLS)
        async with api.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        for got in (whole, streamed):
            turns = [USER, {"role": "assistant", "content": got.content}, {"role": "user", "content": [result]}]
            await api.messages.create(**ASKED | {"messages": turns})
    assert app.requests[0].messages[0] == {"role": "system", "content": "Be brief."}
    for request in app.requests[2:]:
        user, message, tool = request.messages
        assert (user, tool) == (USER, {"role": "tool", "content": "sun", "tool_call_id": CALL.id})
        assert comparable(message) == comparable(found.message)


@in_loop
@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (529, anthropic.InternalServerError, "overloaded_error"),
    ],
)
async def test_an_error_raises_the_clients_exception(status, error, kind):
    async with client(App(MESSAGES, CallError(status, "too long"))) as api:
        with pytest.raises(error, match="too long") as raised:
            await api.messages.create(**ASKED)
    assert raised.value.body == {"type": "error", "error": {"type": kind, "message": "too long"}}


@in_loop
async def test_a_wrong_request_raises_bad_request():
    async with client(App(MESSAGES)) as api:
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content"):
            await api.messages.create(**ASKED | {"messages": [{"role": "user", "content": None}]})
