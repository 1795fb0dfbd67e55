"""The endpoint gives nothing without a key, answers wrong requests with 4xx, and keeps its limits."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from agent_parts import TOKENIZERS, ProgramEnvironment, play
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from random_model import RandomModelEngine
from transformers import AutoTokenizer

from nemo_rl.agents.endpoint.server import AgentEndpoint
from nemo_rl.agents.programs.interfaces import key_of_start
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.experience.trajectory import Ending, Outcome, RolloutLimits
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import GenerationError, WorkerDiedError

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")


class Asking:
    """A program that makes plain HTTP requests; `seen` has what it got."""

    def __init__(self, ask: Callable[[httpx.AsyncClient, Mapping[str, Any]], Any]) -> None:
        self.ask = ask
        self.seen: Any = None

    async def __call__(self, task: Mapping[str, Any]) -> float:
        headers = {"authorization": f"Bearer {task['api_key']}"}
        base = task["base_url"].removesuffix("/v1")
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=30) as client:
            self.seen = await self.ask(client, task)
        return 1.0


def ask(tokenizer: Any, asking: Any, engine: Any = None, **options: Any) -> tuple[Any, Any]:
    program = Asking(asking)
    (sample,) = play(engine or RandomModelEngine(tokenizer, []), ProgramEnvironment(program), tokenizer, **options)
    return program.seen, sample


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer sk-wrong"}, {"x-api-key": ""}, {"authorization": "Basic x"}]
)
def test_nothing_is_answered_without_a_key(tokenizer: Any, headers: dict[str, str]) -> None:
    async def without_key(_: httpx.AsyncClient, task: Mapping[str, Any]) -> list[tuple[int, str]]:
        base = task["base_url"].removesuffix("/v1")
        async with httpx.AsyncClient(base_url=base, headers=headers) as client:
            answers = [await client.post(path, json=CHAT) for path in PATHS]
            answers += [await client.get(path) for path in ("/v1/models", "/v1/models/policy")]
        return [(answer.status_code, answer.text) for answer in answers]

    seen, sample = ask(tokenizer, without_key)
    assert [status for status, _ in seen] == [401] * len(seen)
    assert all("sk-" not in text for _, text in seen)
    assert sample.num_turns == 0


def test_a_program_that_is_started_again_leaves_nothing_of_its_first_start(tokenizer: Any) -> None:
    other = {"model": "policy", "messages": [{"role": "user", "content": "Ho"}]}

    async def once(client: httpx.AsyncClient, task: Mapping[str, Any]) -> list[Any]:
        headers = {"authorization": f"Bearer {key_of_start(task['api_key'], task['start_secret'])}"}
        first = await client.post(PATHS[0], json=CHAT, headers=headers)
        return [first.json()["choices"][0]["message"]["content"]]

    async def twice(client: httpx.AsyncClient, task: Mapping[str, Any]) -> list[Any]:
        key, secret = task["api_key"], task["start_secret"]
        died, again = ({"authorization": f"Bearer {key_of_start(key, secret)}"} for _ in range(2))
        for body in (CHAT, other):
            assert (await client.post(PATHS[0], json=body, headers=died)).status_code == 200
        first = await client.post(PATHS[0], json=CHAT, headers=again)
        others = [died, {"authorization": f"Bearer {key_of_start(key, 'guessed')}"}, {"authorization": f"Bearer {key}"}]
        late = [await client.post(PATHS[0], json=other, headers=each) for each in others]
        return [first.json()["choices"][0]["message"]["content"], *(each.status_code for each in late)]

    (content,), expected = ask(tokenizer, once)
    seen, sample = ask(tokenizer, twice)
    assert seen == [content, 401, 401, 401]
    assert [len(log) for log in sample.logs] == [len(log) for log in expected.logs] == [2]
    assert sample.message_log[1]["token_ids"].tolist() == expected.message_log[1]["token_ids"].tolist()
    assert sample.agent_counts == expected.agent_counts


@pytest.mark.asyncio
async def test_a_key_is_worth_nothing_after_its_sample() -> None:
    endpoint = AgentEndpoint(AgentEndpointConfig())
    sessions: list[Any] = [object(), object()]
    first, second = (endpoint.open(session) for session in sessions)
    transport = httpx.ASGITransport(app=endpoint.application())

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            headers = [{"authorization": f"Bearer {key}"} for key in (first, second)]
            return [(await client.get("/v1/models", headers=each)).status_code for each in headers]

    assert await statuses() == [200, 200]
    endpoint.close(first)
    assert await statuses() == [401, 200]


def test_keys_are_in_no_log_and_no_sample(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    environment = ProgramEnvironment(Asking(lambda client, task: client.post("/v1/chat/completions", json=CHAT)))
    samples = play(RandomModelEngine(tokenizer, []), environment, tokenizer)
    (key,) = environment.keys
    own = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    assert key not in "\n".join(record.getMessage() for record in own)
    assert key not in repr(samples) and key not in str(samples[0].state_dict())


MALFORMED: list[tuple[str, bytes]] = [
    *((path, body) for path in PATHS for body in (b"", b"{", b"[]", b'"x"', b"nul", b"\xff\xfe", b"[" * 5000)),
    ("/v1/chat/completions", b"{}"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "model": 3}'),
    ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "alien", "content": "x"}]}'),
    ("/v1/completions", b'{"model": "m", "prompt": [999999999]}'),
    ("/v1/completions", b'{"model": "m", "prompt": []}'),
    ("/v1/messages", b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'),
]


@pytest.mark.parametrize(("path", "body"), MALFORMED)
def test_malformed_requests_are_refused(endpoint_of_module: Any, path: str, body: bytes) -> None:
    answer = endpoint_of_module(path, body)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def endpoint_of_module(tokenizer: Any) -> Any:
    """Sends requests to one endpoint, whose sample waits until the tests of the module end."""
    import threading

    ready, done, known = threading.Event(), threading.Event(), {}

    async def wait(task: Mapping[str, Any]) -> float:
        known.update(task)
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, done.wait)
        return 0.0

    def run() -> None:
        play(RandomModelEngine(tokenizer, []), ProgramEnvironment(wait), tokenizer)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)

    def send(path: str, body: bytes) -> httpx.Response:
        headers = {"x-api-key": known["api_key"], "content-type": "application/json"}
        return httpx.post(known["base_url"].removesuffix("/v1") + path, content=body, headers=headers, timeout=30)

    yield send
    done.set()
    thread.join(30)


def test_other_paths_and_methods_are_named(endpoint_of_module: Any) -> None:
    answer = endpoint_of_module("/v1/embeddings", b"{}")
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_large_body_is_refused(tokenizer: Any) -> None:
    async def large(client: httpx.AsyncClient, _: Any) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}
        return (await client.post("/v1/chat/completions", json=body)).status_code

    assert ask(tokenizer, large, max_request_mb=0.1)[0] == 413


def test_limits_of_calls_and_rates_hold(tokenizer: Any) -> None:
    async def many(client: httpx.AsyncClient, _: Any) -> list[int]:
        return [(await client.post("/v1/chat/completions", json={**CHAT, "seed": n})).status_code for n in range(5)]

    program = Asking(many)
    (sample,) = play(RandomModelEngine(tokenizer, []), ProgramEnvironment(program, max_calls=3), tokenizer)
    assert program.seen == [200, 200, 200, 403, 403]
    assert (sample.num_turns, sample.ended_by, sample.outcome) == (3, Ending.MAX_TURNS, Outcome.FINISHED)
    assert ask(tokenizer, many, max_requests_per_minute=2)[0] == [200, 200, 429, 429, 429]


def test_a_request_without_room_is_refused_and_the_sample_is_truncated(tokenizer: Any) -> None:
    async def long(client: httpx.AsyncClient, _: Any) -> tuple[int, str]:
        messages = [{"role": "user", "content": "word " * 200}]
        answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
        return answer.status_code, answer.json()["error"]["code"]

    limits = RolloutLimits(max_sequence_length=150, max_turns=1, timeout_s=60)
    seen, sample = ask(tokenizer, long, limits=limits)
    assert seen == (400, "context_length_exceeded")
    assert (sample.outcome, sample.ended_by, sample.reward) == (Outcome.TRUNCATED, Ending.SEQUENCE_LENGTH, 1.0)


def test_concurrent_calls_are_limited(tokenizer: Any) -> None:
    class Slow(RandomModelEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            await asyncio.sleep(0.5)
            return await super().generate(request)

    async def at_once(client: httpx.AsyncClient, _: Any) -> list[int]:
        calls = [client.post("/v1/chat/completions", json={**CHAT, "seed": n}) for n in range(4)]
        return sorted(answer.status_code for answer in await asyncio.gather(*calls))

    assert ask(tokenizer, at_once, Slow(tokenizer, []), max_concurrent_calls=2)[0] == [200, 200, 429, 429]


def test_what_an_engine_refuses_is_the_request_s_fault_and_its_death_ends_the_run(tokenizer: Any) -> None:
    class Broken(RandomModelEngine):
        error: Exception = GenerationError("unknown token ids")

        async def generate(self, request: GenerationRequest) -> GenerationResult:
            raise self.error

    async def once(client: httpx.AsyncClient, _: Any) -> tuple[int, str]:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        return answer.status_code, json.dumps(answer.json())

    engine = Broken(tokenizer, [])
    (status, text), _ = ask(tokenizer, once, engine)
    assert status == 400 and "unknown token ids" in text
    engine.error = WorkerDiedError("all engines died")
    with pytest.raises(WorkerDiedError, match="all engines died"):
        ask(tokenizer, once, engine)


def test_tokenize_gives_the_tokens_of_the_prompt(tokenizer: Any) -> None:
    async def both(client: httpx.AsyncClient, _: Any) -> tuple[Any, Any]:
        tokens = (await client.post("/tokenize", json=CHAT)).json()
        answer = (await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
        return tokens, answer

    (tokens, answer), _ = ask(tokenizer, both)
    assert tokens["tokens"] == answer["prompt_token_ids"] and tokens["count"] == len(tokens["tokens"])


async def models_seen(task: Mapping[str, Any]) -> float:
    """Read the models with both packages; the strict one of OpenAI checks the types of all fields."""
    base, key = task["base_url"], task["api_key"]
    async with AsyncOpenAI(base_url=base, api_key=key, _strict_response_validation=True) as openai:
        listed = [model.id async for model in openai.models.list()]
        assert (await openai.models.retrieve("gpt-x")).id == "gpt-x"
    async with AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key=key) as anthropic:
        assert [model.id async for model in anthropic.models.list()] == listed
        found = await anthropic.models.retrieve(listed[0])
    assert (found.type, found.display_name) == ("model", listed[0])
    return 1.0


def test_the_packages_of_openai_and_anthropic_find_the_model(tokenizer: Any) -> None:
    (sample,) = play(RandomModelEngine(tokenizer, []), ProgramEnvironment(models_seen), tokenizer)
    assert sample.error is None and sample.reward == 1.0
