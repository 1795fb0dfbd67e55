"""Sessions: repeated requests, seeds, limits, histories and messages that templates refuse."""

import asyncio
from typing import Any

import numpy as np
import pytest
from agent_parts import TOKENIZERS
from transformers import AutoTokenizer

from nemo_rl.agents.endpoint.answers import AnswerReader
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest
from nemo_rl.agents.endpoint.exchanges import ClientGoneError
from nemo_rl.agents.endpoint.server import AgentEndpoint
from nemo_rl.agents.endpoint.session import AgentSession, CallParts, SessionSettings
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.experience.trajectory import Ending, RolloutLimits
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams, VersionSpan
from nemo_rl.utils.errors import GenerationError
from nemo_rl.utils.seed import derive_seed

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")


class Engine:
    """Writes one word that depends on the seed, when it may; `text` replaces the word."""

    weight_version = 1
    reads_chats = False

    def __init__(self, tokenizer: Any, text: str | None = None) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.may = asyncio.Event()
        self.may.set()
        self.requests: list[GenerationRequest] = []
        self.cancelled = 0
        self.fails_at: int | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        if self.fails_at == len(self.requests):
            raise GenerationError("refused")
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        text = self.text or f"word {request.seed % 100000}"
        ids = self.tokenizer(text)["input_ids"]
        most = request.sampling.max_new_tokens
        is_cut = len(ids) >= most
        ids = ids[:most] if is_cut else [*ids, self.tokenizer.eos_token_id]
        arrays = np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32)
        return GenerationResult(*arrays, "length" if is_cut else "stop", [VersionSpan(0, 1)])


def session_of(
    engine: Engine, *, most: int = 50, episode: int | None = None, reasoning: str | None = None, **settings: Any
) -> AgentSession:
    limits = RolloutLimits(max_sequence_length=2000, max_turns=1, timeout_s=10, max_episode_tokens=episode)
    parts = CallParts(engine, engine.tokenizer, TextRules(), limits, SamplingParams(max_new_tokens=most))  # type: ignore[arg-type]
    reader = AnswerReader(engine.tokenizer, reasoning_parser=reasoning)
    return AgentSession(parts, SessionSettings(reader, **settings), lambda *parts: derive_seed(3, *parts))


async def stays() -> None:
    """The client stays."""
    await asyncio.Event().wait()


async def ask(
    session: AgentSession, request: CallRequest, identity: str = "", *, is_retry: bool = False
) -> list[CallAnswer]:
    exchange = session.exchange(request, identity or repr(request), is_retry=is_retry)
    return await exchange.answers(stays())


def chat(*texts: str, **options: Any) -> CallRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return CallRequest(messages=messages, **options)


async def test_a_refused_request_that_is_sent_again_is_a_call_of_its_own(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine, max_concurrent_calls=2)
    engine.may.clear()
    running = [asyncio.create_task(ask(session, chat("Hi"), "same")) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(CallError, match="2 requests"):
            await ask(session, chat("Hi"), "same")
    engine.may.set()
    answers = [*await asyncio.gather(*running)]
    answers += [await ask(session, chat("Hi"), "same", is_retry=True) for _ in range(3)]
    assert len({answer[0].id for answer in answers}) == 5 == len(engine.requests)


async def test_a_lost_answer_is_given_to_the_repetition_also_without_the_header(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine)
    engine.may.clear()
    exchange = session.exchange(chat("Hi"), "same", is_retry=False)
    gone = asyncio.Event()
    waiting = asyncio.create_task(exchange.answers(gone.wait()))  # type: ignore[arg-type]
    other = asyncio.create_task(ask(session, chat("Hi"), "same"))  # meant as a second one
    await asyncio.sleep(0.01)
    gone.set()
    with pytest.raises(ClientGoneError):
        await waiting
    again = asyncio.create_task(ask(session, chat("Hi"), "same"))
    await asyncio.sleep(0.01)
    engine.may.set()
    assert (await again)[0].id == exchange.task.result()[0].id != (await other)[0].id
    assert len(engine.requests) == 2 and session.counts["retries"] == 1
    assert (await ask(session, chat("Hi"), "same"))[0].id not in {(await again)[0].id, (await other)[0].id}


async def test_answers_depend_on_what_is_asked_and_not_on_when(tokenizer: Any) -> None:
    requests = [chat("Hi", seed=seed) for seed in (1, 2, 3)] + [chat("Hi", max_tokens=5), chat("Hi")]
    texts = []
    for order in (requests, requests[::-1]):
        session = session_of(Engine(tokenizer))
        answers = {repr(request): (await ask(session, request))[0] for request in order}
        texts.append([(answers[repr(r)].content, answers[repr(r)].id) for r in requests])
    assert texts[0] == texts[1]
    assert len({text for text, _ in texts[0][:3]}) == 3


async def test_a_closed_session_samples_no_more(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine)
    engine.may.clear()
    running = asyncio.create_task(ask(session, chat("Hi")))
    await asyncio.sleep(0.01)
    await session.close()
    with pytest.raises(CallError, match="has ended"):
        await running
    with pytest.raises(CallError, match="has ended"):
        await ask(session, chat("Hi"))
    assert engine.cancelled == 1 and len(engine.requests) == 1 and not session.tree.calls


async def test_a_failing_answer_of_several_ends_the_others(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine, episode=1000)
    engine.may.clear()
    engine.fails_at = 2
    with pytest.raises(CallError, match="refuses the prompt"):
        await ask(session, chat("Hi", num_answers=3))
    await asyncio.sleep(0.01)
    assert engine.cancelled == 2 and not session.tree.calls
    assert session.budget.num_granted == 0


async def test_a_long_beginning_of_an_answer_does_not_hide_the_chat(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine)
    beginning = "so " * 300
    (answer,) = await ask(session, chat("Hi", beginning, continues_last=True))
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": beginning + answer.content}]
    request = CallRequest(messages=[*history, {"role": "user", "content": "NEXT"}])
    (following,) = await ask(session, request)
    text = tokenizer.decode(following.prompt_token_ids)
    assert following.num_cached_tokens == len(answer.prompt_token_ids) + len(answer.token_ids)
    assert text.endswith("<|im_start|>user\nNEXT<|im_end|>\n<|im_start|>assistant\n")


async def test_an_answer_that_was_cut_off_is_continued_token_by_token(tokenizer: Any) -> None:
    engine = Engine(tokenizer, "one two three four five six seven")
    session = session_of(engine)
    (cut,) = await ask(session, chat("Hi", max_tokens=3))
    assert cut.finish_reason == "length"
    (rest,) = await ask(session, chat("Hi", cut.content, continues_last=True))
    assert list(rest.prompt_token_ids) == [*cut.prompt_token_ids, *cut.token_ids]
    assert len(session.tree.leaves()) == 1
    whole = cut.content + rest.content
    (following,) = await ask(session, chat("Hi", whole, "And?"))
    assert following.num_cached_tokens == len(rest.prompt_token_ids) + len(rest.token_ids)


async def test_the_tokens_of_an_episode_bound_parallel_answers_too(tokenizer: Any) -> None:
    engine = Engine(tokenizer, "a b c d e f g h i j k l m n o p")
    session = session_of(engine, episode=12)
    answers = await ask(session, chat("Hi", num_answers=4))
    assert [len(answer.token_ids) for answer in answers] == [3] * 4
    assert session.bound is Ending.EPISODE_TOKENS
    with pytest.raises(CallError) as refused:
        await ask(session, chat("Other"))
    assert refused.value.code == "context_length_exceeded" and "context length" in str(refused.value)


async def test_refused_requests_take_no_call(tokenizer: Any) -> None:
    session = session_of(Engine(tokenizer), max_calls=1)
    with pytest.raises(CallError, match="is left for"):
        await ask(session, chat("word " * 3000))
    assert session.bound is Ending.SEQUENCE_LENGTH
    await ask(session, chat("Hi"))
    assert session.bound is None and session.counts["calls"] == 1


async def test_of_equal_texts_the_one_with_the_same_reasoning_is_continued(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine, reasoning="qwen3")
    thoughts = []
    for thought in ("first", "second"):
        engine.text = f"<think>{thought}</think>yes"
        thoughts.append((await ask(session, chat("Hi"), thought))[0])
    assert [answer.content for answer in thoughts] == ["yes", "yes"]
    for answer in thoughts:
        request = CallRequest(
            messages=[{"role": "user", "content": "Hi"}, answer.message, {"role": "user", "content": "So?"}]
        )
        (following,) = await ask(session, request)
        known = [*answer.prompt_token_ids, *answer.token_ids]
        assert list(following.prompt_token_ids[: len(known)]) == known


@pytest.mark.parametrize(
    "request_",
    [
        CallRequest(messages=[{"role": "user", "content": "Hi"}], template_kwargs={"tokenize_now": object()}),
        CallRequest(
            messages=[
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 9000}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ]
        ),
    ],
)
async def test_odd_messages_are_answered_or_refused_and_never_end_the_run(
    tokenizer: Any, request_: CallRequest
) -> None:
    session = session_of(Engine(tokenizer))
    try:
        await ask(session, request_, "odd")
    except CallError as error:
        assert error.status == 400
    assert not session.failure.done()


async def test_a_template_that_raises_refuses_the_request(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tokenizer)
    session = session_of(engine)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content % 3 }}")
    with pytest.raises(CallError, match="cannot be rendered: .*Error"):
        await ask(session, chat("Hi"))
    assert not session.failure.done() and not engine.requests


async def test_an_odd_name_of_a_tool_is_no_failure(tokenizer: Any) -> None:
    session = session_of(Engine(tokenizer))
    tool = {"type": "function", "function": {"name": 'a"b', "description": "", "parameters": {"type": "object"}}}
    (answer,) = await ask(session, chat("Hi", tools=[tool]), "tools")
    assert answer.content.startswith("word") and not session.failure.done()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_endpoint_listens_on_both_kinds_of_addresses(host: str) -> None:
    import httpx

    endpoint = AgentEndpoint(AgentEndpointConfig(host=host))
    await endpoint.start()
    async with httpx.AsyncClient(base_url=endpoint.address) as client:
        assert (await client.get("/v1/models")).status_code == 401
