"""The Responses API: responses and events against the types and the client of the package openai."""

import asyncio
import functools

import pytest
from dialect_parts import CALL, WEATHER, App, answer, answer_with_calls
from pydantic import TypeAdapter

from nemo_rl.agents.endpoint.calls import CallError
from nemo_rl.agents.endpoint.server import DIALECT_BY_PATH

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")

from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

pytestmark = pytest.mark.fast

RESPONSES = DIALECT_BY_PATH["/v1/responses"]
TOOLS = [{"type": "function", "strict": True, **WEATHER}]
ASKED = {"model": "policy", "input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5}
ANSWERS = [
    answer(),
    answer(""),
    answer("Hi", reasoning="hm", finish_reason="length"),
    answer("", reasoning="hm", finish_reason="length"),
    answer_with_calls(),
    answer_with_calls("Let me look.", reasoning=""),
]
EVENT = TypeAdapter(ResponseStreamEvent)


def in_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def client(app: App):
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app.asgi))
    return openai.AsyncOpenAI(api_key="key", base_url="http://endpoint/v1", http_client=http, max_retries=0)


def response(body, found):
    return RESPONSES.response(body, RESPONSES.read(body, {}), [found], {})


def kinds_of(found):
    kinds = ["reasoning"] if found.reasoning is not None else []
    return kinds + ["message"] * bool(found.content or not found.tool_calls) + ["function_call"] * len(found.tool_calls)


@pytest.mark.parametrize("found", ANSWERS)
@pytest.mark.parametrize("changes", [{}, {"tools": TOOLS, "tool_choice": "required", "return_token_ids": True}])
def test_a_response_has_the_fields_of_openai(found, changes):
    got = Response.model_validate(response(ASKED | changes, found))
    Response.model_validate_json(got.model_dump_json(by_alias=True), strict=True)
    assert [item.type for item in got.output] == kinds_of(found)
    assert set(got.model_extra) == ({"prompt_token_ids", "token_ids"} if changes else set())
    assert (got.output_text, got.instructions, got.temperature) == (found.content, "Be brief.", 0.5)
    assert got.status == ("incomplete" if found.finish_reason == "length" else "completed")
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens) == (3, 2, 5)
    assert got.usage.input_tokens_details.cached_tokens == 2
    for item in got.output:
        assert not item.model_extra


@pytest.mark.parametrize("found", ANSWERS)
def test_events_are_those_of_openai_in_order(found):
    events = list(RESPONSES.events(ASKED, RESPONSES.read(ASKED, {}), [found], {}))
    read = [EVENT.validate_python(event.data) for event in events]
    assert [event.name for event in events] == [event.type for event in read]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert not any(event.model_extra for event in read if event.type != "response.function_call_arguments.done")
    expected = ["response.created", "response.in_progress"]
    for kind in kinds_of(found):
        text = found.reasoning if kind == "reasoning" else found.content
        part = "output_text" if kind == "message" else "reasoning_text"
        inner = ["function_call_arguments.delta", "function_call_arguments.done"]
        if kind != "function_call":
            deltas = [f"{part}.delta"] * bool(text)
            inner = ["content_part.added", *deltas, f"{part}.done", "content_part.done"]
        expected += [f"response.{name}" for name in ("output_item.added", *inner, "output_item.done")]
    assert [event.type for event in read] == [*expected, f"response.{read[-1].response.status}"]
    assert read[0].response.status == "in_progress" and read[0].response.output == []
    assert read[-1].response.usage.total_tokens == 5


@in_loop
@pytest.mark.parametrize("found", [each for each in ANSWERS if each.finish_reason != "length"])
async def test_the_clients_stream_puts_a_response_together(found):
    async with (
        client(App(RESPONSES, [found])) as api,
        api.responses.stream(model="policy", input="Hi", tools=TOOLS) as stream,
    ):
        got = await stream.get_final_response()
    assert [item.type for item in got.output] == kinds_of(found)
    assert got.output_text == found.content
    calls = [item for item in got.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [
        (call.id, call.arguments) for call in found.tool_calls
    ]


@in_loop
async def test_the_client_continues_a_conversation_in_both_ways():
    found = answer_with_calls("Let me look.", reasoning="hm")
    app = App(RESPONSES, [found], [answer(id="8")], [answer(id="9")], [answer("Bye", id="10")])
    output = {"type": "function_call_output", "call_id": CALL.id, "output": "sun"}
    async with client(app) as api:
        first = await api.responses.create(model="policy", input="Hi", tools=TOOLS)
        history = [{"role": "user", "content": "Hi"}, *first.output, output]
        await api.responses.create(model="policy", input=history)
        second = await api.responses.create(model="policy", input=[output], previous_response_id=first.id)
        await api.responses.create(model="policy", input="more", previous_response_id=second.id, instructions="a")
    result = {"role": "tool", "content": "sun", "tool_call_id": CALL.id}
    whole = [{"role": "user", "content": "Hi"}, found.message, result]
    assert app.requests[1].messages == whole
    assert app.requests[2].messages == whole
    assert app.requests[3].messages[0] == {"role": "system", "content": "a"}


@in_loop
async def test_an_unknown_response_is_not_found():
    app = App(RESPONSES, [answer()])
    async with client(app) as api:
        kept = await api.responses.create(model="policy", input="Hi", store=False)
        for name in (kept.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError, match=name) as raised:
                await api.responses.create(model="policy", input="Hi", previous_response_id=name)
            assert raised.value.param == "previous_response_id"
    assert app.memory == {}


def test_streamed_responses_are_stored_too():
    memory = {}
    request = RESPONSES.read(ASKED, memory)
    list(RESPONSES.events(ASKED | {"stream": True}, request, [answer()], memory))
    again = RESPONSES.read({"input": "more", "previous_response_id": "resp_7"}, memory)
    assert [message["content"] for message in again.messages] == ["Hi", "Hi!", "more"]


@in_loop
async def test_an_error_raises_the_clients_exception():
    async with client(App(RESPONSES, CallError(429, "wait", "rate_limit_exceeded"))) as api:
        with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
            await api.responses.create(model="policy", input="Hi", max_output_tokens=0)
        with pytest.raises(openai.RateLimitError, match="wait"):
            await api.responses.create(model="policy", input="Hi")
