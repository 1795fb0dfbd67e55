"""Chat Completions and Completions: their responses against the types and the client of the package openai."""

import asyncio
import functools

import pytest
from dialect_parts import CALL, SECOND_CALL, WEATHER, App, answer, answer_with_calls

from nemo_rl.agents.endpoint.calls import CallError
from nemo_rl.agents.endpoint.server import DIALECT_BY_PATH

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")

from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

pytestmark = pytest.mark.fast

CHAT, COMPLETIONS = DIALECT_BY_PATH["/v1/chat/completions"], DIALECT_BY_PATH["/v1/completions"]
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": WEATHER}]
ASKED = {"model": "policy", "messages": MESSAGES}
ALL = ASKED | {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
ANSWERS = [
    answer(),
    answer(""),
    answer("Hi", reasoning="hm", finish_reason="length"),
    answer_with_calls(),
    answer_with_calls("Let me look.", reasoning=""),
]


def with_client(test):
    """Run a test in an event loop; `client(app)` opens the package's client for an app."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def client(app: App):
    transport = httpx2.ASGITransport(app=app.asgi)
    http = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(api_key="key", base_url="http://endpoint/v1", http_client=http, max_retries=0)


def response(dialect, body, found):
    return dialect.response(body, dialect.read(body, {}), found, {})


def chunks(dialect, body, found):
    *events, last = dialect.events(body, dialect.read(body, {}), found, {})
    assert last.data == "[DONE]"
    return [event.data for event in events]


@pytest.mark.parametrize("found", ANSWERS)
@pytest.mark.parametrize("body", [ASKED, ALL])
def test_a_chat_completion_has_the_fields_of_openai(found, body):
    completion = ChatCompletion.model_validate(response(CHAT, body, [found, found]), strict=True)
    asked_ids = {"prompt_token_ids"} if body is ALL else set()
    assert set(completion.model_extra) == asked_ids
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert set(choice.model_extra) == ({"token_ids"} if body is ALL else set())
        assert set(choice.message.model_extra) == {"reasoning_content"}
        assert (choice.logprobs is not None) is (body is ALL)
    assert completion.usage.total_tokens == 3 + 2 * 2


@pytest.mark.parametrize("found", ANSWERS)
@pytest.mark.parametrize("body", [ASKED, ALL])
def test_chunks_have_the_fields_of_openai_and_the_same_content(found, body):
    whole = response(CHAT, body, [found])["choices"][0]
    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks(CHAT, body, [found])]
    if body is ALL:
        assert read[-1].choices == [] and read.pop().usage.prompt_tokens_details.cached_tokens == 2
        assert read[0].prompt_token_ids == [1, 2, 3]
    choices = [chunk.choices[0] for chunk in read]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == found.content
    scored = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.token for token in scored] == (["Hi", "!"] if body is ALL else [])
    ids = [token for choice in choices for token in choice.model_extra.get("token_ids", [])]
    assert ids == ([4, 5] if body is ALL else [])


@with_client
async def test_the_client_reads_a_chat_completion():
    app = App(CHAT, [answer_with_calls(reasoning="hm"), answer("Hi", finish_reason="length")])
    async with client(app) as api:
        got = await api.chat.completions.create(
            model="policy", messages=MESSAGES, tools=TOOLS, n=2, logprobs=True, extra_body={"return_token_ids": True}
        )
    first, second = got.choices
    assert first.message.content is None and first.message.reasoning_content == "hm"
    assert [call.function.arguments for call in first.message.tool_calls] == [CALL.arguments, SECOND_CALL.arguments]
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "length")
    assert second.message.tool_calls is None
    assert [(token.token, token.bytes, token.logprob) for token in second.logprobs.content] == [
        ("Hi", [72, 105], -0.5),
        ("!", [33], -0.25),
    ]
    assert (got.prompt_token_ids, first.token_ids) == ([1, 2, 3], [4, 5])
    assert (got.id, got.object, got.model) == ("chatcmpl-7", "chat.completion", "policy")
    assert (app.requests[0].num_answers, app.requests[0].tools) == (2, TOOLS)


@with_client
async def test_the_clients_message_is_sent_back_as_it_is():
    found = answer_with_calls("Let me look.", reasoning="hm")
    app = App(CHAT, [found], [answer()])
    async with client(app) as api:
        got = await api.chat.completions.create(model="policy", messages=MESSAGES, tools=TOOLS)
        result = {"role": "tool", "tool_call_id": CALL.id, "content": "sun"}
        history = [*MESSAGES, got.choices[0].message, result]
        await api.chat.completions.create(model="policy", messages=history, tools=TOOLS)
    assert app.requests[1].messages == [*MESSAGES, found.message, result]


@with_client
@pytest.mark.parametrize("found", ANSWERS)
async def test_the_clients_stream_puts_a_chat_completion_together(found):
    options = {"include_usage": True}
    async with client(App(CHAT, [found])) as api:
        ask = {"model": "policy", "messages": MESSAGES, "stream_options": options, "logprobs": True}
        if found.finish_reason == "length":
            with pytest.raises(openai.LengthFinishReasonError):
                async with api.chat.completions.stream(**ask) as stream:
                    await stream.get_final_completion()
            return
        async with api.chat.completions.stream(**ask) as stream:
            got = await stream.get_final_completion()
    choice = got.choices[0]
    assert (choice.message.content or "", choice.finish_reason) == (found.content, found.finish_reason)
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert calls == [(call.id, call.name, call.arguments) for call in found.tool_calls]
    assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.25]
    assert got.usage.completion_tokens == 2


@with_client
async def test_chunks_of_several_answers_have_their_index():
    async with client(App(CHAT, [answer("one"), answer("two")])) as api:
        stream = await api.chat.completions.create(model="policy", messages=MESSAGES, stream=True, n=2)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["one", "two"]


@pytest.mark.parametrize("body", [{"prompt": "Hi"}, {"prompt": [1], "logprobs": 0, "return_token_ids": True}])
def test_a_completion_has_the_fields_of_openai(body):
    found = [answer(finish_reason="length"), answer_with_calls("a")]
    completion = Completion.model_validate(response(COMPLETIONS, body, found), strict=True)
    assert [choice.finish_reason for choice in completion.choices] == ["length", "stop"]
    assert [choice.text for choice in completion.choices] == ["Hi!", "a"]
    assert set(completion.model_extra) == set()
    extra = {"token_ids": [4, 5], "prompt_token_ids": [1, 2, 3]} if "logprobs" in body else {}
    assert completion.choices[0].model_extra == extra


@pytest.mark.parametrize(("logprobs", "top"), [(0, None), (1, [{"Hi": -0.5}, {"!": -0.25}])])
def test_the_log_probabilities_of_a_completion(logprobs, top):
    got = response(COMPLETIONS, {"prompt": "a", "logprobs": logprobs}, [answer()])["choices"][0]["logprobs"]
    assert got == {
        "tokens": ["Hi", "!"],
        "token_logprobs": [-0.5, -0.25],
        "text_offset": [0, 2],
        "top_logprobs": top,
    }


def test_tokens_without_known_texts_are_written_as_numbers():
    got = response(CHAT, ALL, [answer(token_texts=())])["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in got] == ["token_id:4", "token_id:5"]


@with_client
async def test_the_client_reads_completions():
    app = App(COMPLETIONS, [answer(), answer("b")], [answer(), answer("b")])
    async with client(app) as api:
        got = await api.completions.create(model="policy", prompt=[1, 2], n=2, logprobs=1, max_tokens=5)
        assert [choice.text for choice in got.choices] == ["Hi!", "b"]
        stream = await api.completions.create(
            model="policy", prompt="a", n=2, stream=True, stream_options={"include_usage": True}
        )
        read = [chunk async for chunk in stream]
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in read[:-1]] == [
        ("Hi!", None),
        ("", "stop"),
        ("b", None),
        ("", "stop"),
    ]
    assert (read[-1].choices, read[-1].usage.completion_tokens) == ([], 4)
    assert app.requests[0].prompt == [1, 2] and app.requests[1].prompt == "a"


@with_client
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
async def test_an_error_raises_the_clients_exception(status, error):
    app = App(CHAT, CallError(status, "too long", "context_length_exceeded", "messages"))
    async with client(app) as api:
        with pytest.raises(error, match="too long") as raised:
            await api.chat.completions.create(model="policy", messages=MESSAGES)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    assert isinstance(raised.value.type, str)


@with_client
@pytest.mark.parametrize("stream", [True, False])
async def test_a_wrong_request_raises_bad_request(stream):
    async with client(App(CHAT)) as api:
        with pytest.raises(openai.BadRequestError, match="temperature") as raised:
            await api.chat.completions.create(model="policy", messages=MESSAGES, temperature=5, stream=stream)
    assert raised.value.param == "temperature"
