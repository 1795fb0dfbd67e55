"""The model of an endpoint: what it is sent, what is sent again, and what an answer is."""

import asyncio
import math
import time
from email.utils import formatdate
from typing import Any

import pytest
from chat_server import KEY, ChatServer, CutOff, Stall, completion, echo, endpoint_config
from starlette.responses import JSONResponse, PlainTextResponse, Response

from nemo_rl.data.messages.encoding import encode_text, render_chat
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.models.generation.remote.chats import ChatInput, text_tokenizer
from nemo_rl.models.generation.remote.connection import pause_s, seconds_of
from nemo_rl.models.generation.remote.model import ChatModel, UnreadableError, chat_body, read_completion, wire_messages
from nemo_rl.utils.errors import ConfigError, EndpointUnusableError, NoAnswerError

TOKENIZER = text_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)
HI = ChatInput([{"role": "user", "content": "hi"}])


def request_of(chat: ChatInput = HI, sampling: SamplingParams = GREEDY, seed: int = 7) -> GenerationRequest:
    return GenerationRequest([1], sampling, seed, chat=chat)


def ask(server: ChatServer, *requests: GenerationRequest, **keys: Any) -> tuple[list[GenerationResult], ChatModel]:
    model = ChatModel(endpoint_config(server, **keys), TOKENIZER)

    async def all_answers() -> list[GenerationResult]:
        return list(await asyncio.gather(*(model.generate(each) for each in requests or [request_of()])))

    return asyncio.run(all_answers()), model


def failure(status: int, text: str = "no", **headers: str) -> Response:
    return JSONResponse({"error": {"message": text}}, status, headers=headers)


def test_an_answer_has_text_length_and_tokens_that_are_decoded_exactly() -> None:
    with ChatServer(echo) as server:
        chat = ChatInput([{"role": "user", "content": "é 漢 <|im_end|>"}])
        (result,), model = ask(server, request_of(chat))
    assert result.text == "you said é 漢 <|im_end|>" == TOKENIZER.decode(result.token_ids)
    assert (result.finish_reason, result.answer and result.answer.num_tokens) == ("stop", 3)
    assert all(math.isnan(logprob) for logprob in result.logprobs) and len(result.logprobs) == len(result.token_ids)
    assert model.counts.answers == model.counts.requests == 1


def test_a_request_has_the_known_fields_and_others_only_if_they_are_set() -> None:
    with ChatServer(echo) as server:
        ask(server)
        tools = [{"type": "function", "function": {"name": "f"}}]
        sampling = SamplingParams(0.5, 4, 0.9, 30, (2,), ("END",), ("bad",))
        chat = ChatInput(HI.messages, tools, {"enable_thinking": False}, may_call=False)
        extra = {"max_tokens": None, "max_completion_tokens": 9, "seed": None}
        ask(server, request_of(chat, sampling, seed=2**63 - 1), extra_body=extra)
    hi = [{"role": "user", "content": "hi"}]
    assert server.bodies[0] == {
        "model": "tiny",
        "messages": hi,
        "seed": 7,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 20,
    }
    assert server.bodies[1] == {
        "model": "tiny",
        "messages": hi,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "stop_token_ids": [2],
        "bad_words": ["bad"],
        "tools": tools,
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_completion_tokens": 9,
    }
    assert "authorization" not in server.headers[0]


def test_seeds_arrive_exactly() -> None:
    with ChatServer(echo) as server:
        ask(server, request_of(seed=2**63 - 1))
    assert server.bodies[0]["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    "trouble",
    [
        *(failure(status) for status in (408, 409, 425, 429, 500, 502, 503, 504)),
        PlainTextResponse("<html>busy</html>"),
        JSONResponse({"choices": []}),
        JSONResponse({"error": "overloaded"}),
        JSONResponse(completion("half", finish_reason="abort")),
        Stall("{}"),
        CutOff(),
    ],
    ids=lambda each: f"{type(each).__name__}-{each.status_code}-{bytes(each.body)[:12].decode()}",
)
def test_a_failure_that_may_pass_is_asked_again(trouble: Response) -> None:
    with ChatServer(echo, [trouble]) as server:
        (result,), model = ask(server, timeout_s=0.4)
    assert result.text == "you said hi"
    assert (model.counts.requests, model.counts.repeated, model.counts.without_answer) == (2, 1, 0)
    assert server.bodies[0] == server.bodies[1]


def test_pauses_grow_and_the_servers_wish_counts() -> None:
    script = [failure(429, **{"Retry-After": "0.4"}), failure(503), failure(503)]
    with ChatServer(echo, script) as server:
        ask(server, backoff_s=0.1)
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert waits[0] >= 0.4 and waits[1] >= 0.1 and waits[2] >= 0.2
    assert all(0.5 * 2**n <= pause_s(n, 1.0, 8.0, 0.0) <= min(2**n, 8.0) for n in range(3))
    assert pause_s(10**6, 1.0, 8.0, 0.0) <= 8.0 and pause_s(0, 1.0, 8.0, 99.0) == 99.0


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("2", 2, 2), ("-1", 0, 0), ("1e9", 3600, 3600), ("nan", 0, 0), ("soon", 0, 0), ("", 0, 0), (None, 0, 0)],
)
def test_retry_after_is_a_number(header: str | None, low: float, high: float) -> None:
    assert low <= seconds_of(header) <= high


def test_retry_after_is_a_date() -> None:
    assert 25 < seconds_of(formatdate(time.time() + 30, usegmt=True)) <= 30


def test_after_all_attempts_there_is_no_answer() -> None:
    with (
        ChatServer(echo, [failure(503, f"overloaded {KEY}")] * 3) as server,
        pytest.raises(NoAnswerError, match=r"503.*\(attempt 3 of 3\)") as error,
    ):
        ask(server, max_attempts=3)
    assert not error.value.is_refused and len(server.bodies) == 3


def test_an_unreachable_server_gives_no_answer() -> None:
    with ChatServer(echo) as server:
        config = {"base_url": "http://127.0.0.1:9/v1", "max_attempts": 2}
        with pytest.raises(NoAnswerError, match="cannot be reached"):
            ask(server, **config)


@pytest.mark.parametrize("status", [400, 403, 422])
def test_a_refused_request_is_not_sent_again(status: int) -> None:
    with (
        ChatServer(echo, [failure(status, "temperature must be 1")]) as server,
        pytest.raises(NoAnswerError, match="temperature must be 1") as error,
    ):
        ask(server)
    assert error.value.is_refused and not error.value.is_too_long and len(server.bodies) == 1


@pytest.mark.parametrize("status", [401, 404])
def test_an_endpoint_that_refuses_the_run_ends_it_and_the_key_stays_secret(status: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", KEY)
    with (
        ChatServer(echo, [failure(status, f"wrong: Bearer {KEY}")]) as server,
        pytest.raises(EndpointUnusableError) as error,
    ):
        ask(server, api_key_env="SECRET")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error.value) and "***" in str(error.value)


def test_a_key_that_is_not_there_is_named() -> None:
    with ChatServer(echo) as server, pytest.raises(ConfigError, match=r"generation\.endpoint\.api_key_env=NOT_THERE"):
        ask(server, api_key_env="NOT_THERE")


def test_an_answer_that_does_not_fit_ends_at_the_context_and_a_full_one_is_none() -> None:
    full = failure(400, "This model's maximum context length is 20 tokens. However, you requested 20 output tokens")
    with ChatServer(echo, [full]) as server:
        ask(server)
        assert [body.get("max_tokens") for body in server.bodies] == [20, None]
        server.script = [full, full]
        with pytest.raises(NoAnswerError) as error:
            ask(server)
    assert error.value.is_too_long
    extra = {"max_tokens": None, "max_completion_tokens": 20}
    with ChatServer(echo, [full]) as server:
        ask(server, extra_body=extra)
        assert [body.get("max_completion_tokens") for body in server.bodies] == [20, None]
        assert not any("max_tokens" in body for body in server.bodies)


def test_a_withheld_answer_is_none_and_an_empty_one_is_one() -> None:
    with ChatServer(echo, [JSONResponse(completion("", finish_reason="content_filter"))]) as server:
        with pytest.raises(NoAnswerError, match="withheld") as error:
            ask(server)
        assert error.value.is_withheld and error.value.is_refused and len(server.bodies) == 1
        server.script = [JSONResponse(completion(None, finish_reason="length", tokens=None))]
        (result,), _ = ask(server)
    assert (result.text, result.finish_reason) == ("", "length")
    assert result.answer is not None and result.answer.num_tokens is None


def test_requests_at_the_same_time_are_bounded_and_a_pause_takes_no_place() -> None:
    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return await echo(body)

    with ChatServer(slow, [failure(429, **{"Retry-After": "0.5"})]) as server:
        results, _ = ask(server, *[request_of(seed=n) for n in range(12)], max_concurrent_requests=3)
    assert len(results) == 12 and server.most_at_once == 3
    paused = server.bodies[0]["seed"]
    assert server.bodies[-1]["seed"] == paused and len(server.bodies) == 13


def test_the_stop_string_stays_in_the_text_where_the_server_names_it() -> None:
    answer = completion("so", stop_reason="</a>")
    with ChatServer(echo, [JSONResponse(answer), JSONResponse(completion("so", stop_reason=151645))]) as server:
        texts = [ask(server)[0][0].text for _ in range(2)]
    assert texts == ["so</a>", "so"]


def test_reasoning_and_tool_calls_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer, reason = read_completion(
        completion(None, "tool_calls", message={"reasoning_content": "hm", "tool_calls": [call]})
    )
    assert (answer.reasoning, reason, answer.content) == ("hm", "stop", "")
    assert answer.text == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert answer.fields["tool_calls"] == [call] and answer.fields["spoken"] == ""
    parts = completion(None, message={"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]})
    assert read_completion(parts)[0].text == "ab?"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ({"a": "é"}, '{"a": "é"}'),
        ({}, "{}"),
        (None, "{}"),
        ("{'a': \ud800", "{'a': ?"),
        ('{"a": "x\\ud800"}', '{"a": "x?"}'),
        ('{"a":"\\u00e9"}', '{"a":"\\u00e9"}'),
    ],
)
def test_calls_have_json_without_halves_of_characters(arguments: Any, read: str) -> None:
    function = {"name": "add\ud800", "arguments": arguments}
    answer, _ = read_completion(
        completion(None, "tool_calls", message={"tool_calls": [{"id": "\udfff", "function": function}]})
    )
    (call,) = answer.tool_calls
    assert (call.id, call.name, call.arguments) == ("?", "add?", read)
    assert TOKENIZER(answer.text)["input_ids"]
    assert read_completion(completion("a", stop_reason="b\udc00"))[0].text == "ab?"


@pytest.mark.parametrize(
    "broken",
    [
        *(None, [], "text", {}, {"choices": None}, {"choices": [{}]}, {"error": {"message": "x"}}),
        *(completion(5), completion("x", None), completion("x", "weird"), {"choices": [{"message": None}]}),  # type: ignore[arg-type]
        completion("x", message={"tool_calls": [{"id": "1"}]}),
    ],
)
def test_what_is_no_completion_is_no_answer(broken: Any) -> None:
    with pytest.raises(UnreadableError):
        read_completion(broken)


def test_messages_get_what_servers_ask_for() -> None:
    messages = [
        {"role": "system", "content": "s", "own": 1},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "name": "f", "content": "42"},
        {"role": "environment", "content": [{"type": "text", "text": "go"}]},
    ]
    call = {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert list(wire_messages(messages)) == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "name": "f", "content": "42", "tool_call_id": "call_1_0"},
        {"role": "user", "content": "go"},
    ]


def test_texts_are_encoded_as_bytes_without_special_tokens() -> None:
    text = render_chat([{"role": "user", "content": "é  漢\n\t<|im_end|> ."}], TOKENIZER, add_generation_prompt=True)
    ids = encode_text(text, TOKENIZER)
    assert text == "[user]\né  漢\n\t<|im_end|> .\n[assistant]\n" == TOKENIZER.decode(ids)
    assert len(ids) == len(text.encode()) and TOKENIZER.all_special_tokens == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"base_url": "host:8000/v1"}, "must be http"),
        ({"base_url": "http://h/v1?api-version=1"}, "has a query"),
        ({"base_url": "http://h/v1/chat/completions"}, "leave that out"),
        ({"extra_body": {"stream": True, "n": 2}}, "extra_body has n, stream"),
        ({"max_attempts": 0}, "max_attempts"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, Any], told: str) -> None:
    with ChatServer(echo) as server, pytest.raises(ConfigError, match=told):
        endpoint_config(server, **keys)


@pytest.mark.parametrize("keys", [{"base_url": f"http://me:{KEY}@h/v1"}, {"api_key_env": KEY}])
def test_a_key_in_the_configuration_is_refused_and_not_shown(keys: dict[str, Any]) -> None:
    with ChatServer(echo) as server, pytest.raises(ConfigError) as error:
        endpoint_config(server, **keys)
    assert KEY not in str(error.value)


def test_a_body_is_made_of_the_requests_own_objects() -> None:
    with ChatServer(echo) as server:
        config = endpoint_config(server, extra_body={"top_p": 0.5})
    assert chat_body(config, request_of())["top_p"] == 0.5
