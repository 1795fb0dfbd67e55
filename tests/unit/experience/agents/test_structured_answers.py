"""Programs demand a form of their answers: the packages' own ways, on a real engine, and what of them is trained."""

import asyncio
import importlib.util
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal

import openai
import pytest
import torch
from agent_parts import ROOT, ProgramEnvironment, collecting, rows
from anthropic import AsyncAnthropic
from engine_process import EngineProcess
from openai import AsyncOpenAI
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.utils.errors import GenerationError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

MODEL = ROOT / "examples/assets/tiny-tools"
EXPRESSION = {
    "type": "object",
    "properties": {"expression": {"type": "string", "pattern": "^[0-9]{1,3}\\*[0-9]{1,3}$"}},
}
CALCULATOR = {
    "name": "calculator",
    "description": "Calculates.",
    "parameters": {**EXPRESSION, "required": ["expression"]},
}
CHECK = {
    "name": "check",
    "parameters": {
        "type": "object",
        "properties": {"verdict": {"$ref": "#/$defs/verdict"}},
        "required": ["verdict"],
        "$defs": {"verdict": {"enum": ["right", "wrong"]}},
    },
}
TOOLS: list[Any] = [{"type": "function", "function": CALCULATOR}, {"type": "function", "function": CHECK}]
PRODUCT = re.compile(r"[0-9]{1,3}\*[0-9]{1,3}")


class Verdict(BaseModel):
    """Its values are short, whatever a model writes."""

    word: Literal["right", "wrong"]
    sure: bool


SCHEMA = {**Verdict.model_json_schema(), "additionalProperties": False}


class ProcessEngine:
    """The engine of another process, for the event loops of several tests.

    Attributes:
        asked: requests that have reached the engine.
    """

    weight_version = 0
    reads_chats = False

    def __init__(self, process: EngineProcess, name: str) -> None:
        self._process, self._name = process, name
        self._one = threading.Lock()
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await asyncio.to_thread(self._generate, request)
        if result.error is not None:
            raise GenerationError(result.error)
        return result

    def _generate(self, request: GenerationRequest) -> GenerationResult:
        with self._one:
            self.asked.append(request)
            return self._process.generate(self._name, [request])[0]

    def describe_open(self) -> str:
        return ""


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    def settings(backend: str) -> EngineSettings:
        return EngineSettings(
            backend,
            str(MODEL),
            str(MODEL),
            "cpu",
            "float32",
            max_model_len=1024,
            kv_cache_bytes=32 << 20,
            load_weights=True,
        )

    with EngineProcess({backend: settings(backend) for backend in ("vllm", "hf")}) as started:
        yield started


@pytest.fixture
def engine(process: EngineProcess) -> ProcessEngine:
    return ProcessEngine(process, "vllm")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def policy() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


SQL = """
root ::= "SELECT " columns " from " table
columns ::= column | column ", " column
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""


type Program = Callable[[AsyncOpenAI, list[Any]], Awaitable[Any]]


def play(
    engine: ProcessEngine,
    tokenizer: Any,
    program: Program,
    *,
    phase: str = "train",
    sampling: Mapping[str, Any] | None = None,
    **section: Any,
) -> tuple[Trajectory, Any]:
    """Play one program with a client of its own; return the sample, and what the program returned."""
    returned: list[Any] = []

    async def run(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
            returned.append(await program(client, list(task["messages"])))
        return 1.0

    wanted = SamplingParams(**{"max_new_tokens": 120, "stop_token_ids": (258,), **(sampling or {})})
    with collecting(engine, ProgramEnvironment(run, **section), tokenizer) as runner:
        (sample,) = runner.collect(rows(tokenizer, 1), 1, wanted, RolloutKey(1, phase, 0)).trajectories
    assert sample.error is None, sample.error
    return sample, returned[0]


@torch.no_grad()
def scores(policy: Any, sample: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Return recorded log-probabilities of all trained tokens, and those of Hugging Face without any mask."""
    batch = build_training_batch(rows_of([sample]), 256, mask_truncated=False)
    trained = batch["token_mask"].bool()
    forced = (
        policy(batch["input_ids"]).logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    )
    return batch["generation_logprobs"][trained], forced[trained[:, 1:]]


async def formed(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """The ways of the packages openai and vLLM to demand a form, each once."""
    chat, found = client.chat.completions, []
    parsed = await chat.parse(model="policy", messages=messages, response_format=Verdict)
    found.append(parsed.choices[0].message.parsed)
    response = await client.responses.parse(model="policy", input=messages, text_format=Verdict)
    found.append(response.output_parsed)
    async with chat.stream(model="policy", messages=messages, response_format=Verdict, seed=5) as stream:
        found.append((await stream.get_final_completion()).choices[0].message.parsed)
    for body in (
        {"structured_outputs": {"choice": ["right", "wrong", "rightly"]}},
        {"guided_choice": ["right", "wrong", "rightly"]},
        {"structured_outputs": {"regex": "[0-9]{2,4}x"}},
        {"guided_grammar": SQL},
        {"structured_outputs": {"regex": "[a-z0-9.]{1,20}@[a-z]{6,10}\\.com\n"}, "stop": ["\n"]},
    ):
        answer = await chat.create(model="policy", messages=messages, extra_body=body)
        found.append(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
    return found


def test_the_packages_ways_to_demand_a_form_are_kept_and_trained_exactly(engine, tokenizer, policy):
    sample, found = play(engine, tokenizer, formed)
    assert all(isinstance(each, Verdict) for each in found[:3])
    assert found[3] in ("right", "wrong", "rightly") and found[4] in ("right", "wrong", "rightly")
    assert re.fullmatch("[0-9]{2,4}x", found[5]) and re.fullmatch("SELECT (col_[12](, )?)+ from table_[12]", found[6])
    assert re.fullmatch("[a-z0-9.]{1,20}@[a-z]{6,10}[.]com", found[7]), "the stop string is cut off"
    recorded, forced = scores(policy, sample)
    assert len(recorded) == sample.agent_counts["constrained_tokens"] > 40
    assert (recorded - forced).abs().max() < 1e-4
    # The policy would hardly write so: with the mask, these numbers would be near 0.
    assert forced.mean() < -3


def test_log_probabilities_under_the_mask_are_others(engine, tokenizer, policy):
    """Nothing trains in a validation, so no second request scores the answers, and any temperature is allowed."""
    sample, found = play(engine, tokenizer, formed, phase="validation", sampling={"temperature": 0.7})
    assert all(isinstance(each, Verdict) for each in found[:3])
    recorded, forced = scores(policy, sample)
    assert (recorded - forced).abs().max() > 1.0


async def forced_calls(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """A forced call, its result, and a free answer; then calls of a named tool in all APIs."""
    chat, found = client.chat.completions, []
    options: dict[str, Any] = {"model": "policy", "tools": TOOLS}
    first = await chat.create(messages=messages, tool_choice="required", parallel_tool_calls=False, **options)
    choice = first.choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    found.append((call.function.name, json.loads(call.function.arguments)))
    history = [*messages, choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
    await chat.create(messages=history, max_tokens=3, **options)
    named = {"type": "function", "function": {"name": "calculator"}}
    second = await chat.create(messages=messages, tool_choice=named, **options)
    (call,) = second.choices[0].message.tool_calls
    found.append((call.function.name, json.loads(call.function.arguments)))
    flat: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = await client.responses.create(model="policy", input=messages, tools=flat, tool_choice="required")
    found += [(item.name, json.loads(item.arguments)) for item in response.output]
    url = str(client.base_url).removesuffix("/v1/")
    async with AsyncAnthropic(base_url=url, api_key=client.api_key) as anthropic:
        message = await anthropic.messages.create(
            model="policy",
            max_tokens=400,
            messages=messages,
            tools=[{"name": "check", "input_schema": CHECK["parameters"]}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    found += [(block.name, block.input) for block in message.content]
    return found


def test_a_forced_call_is_one_of_the_tools_and_its_conversation_goes_on(engine, tokenizer, policy):
    sample, found = play(engine, tokenizer, forced_calls, sampling={"max_new_tokens": 400})
    assert len(found) >= 4 and found[1][0] == "calculator" and found[-1][0] == "check"
    for name, arguments in found:
        if name == "calculator":
            assert PRODUCT.fullmatch(arguments["expression"])
        else:
            assert arguments["verdict"] in ("right", "wrong")
    assert len(sample.branches) == 3, "the free answer continues the first call"
    recorded, forced = scores(policy, sample)
    assert (recorded - forced).abs().max() < 1e-4
    assert 0 < len(recorded) - sample.agent_counts["constrained_tokens"] <= 3


def test_answers_of_one_request_have_the_form_and_their_own_seeds(engine, tokenizer):
    async def several(client: AsyncOpenAI, messages: list[Any]) -> list[str]:
        body = {"structured_outputs": {"regex": "[0-9]{8}"}}
        answers = await client.chat.completions.create(model="policy", messages=messages, n=4, extra_body=body)
        return [str(choice.message.content) for choice in answers.choices]

    _, first = play(engine, tokenizer, several)
    _, second = play(engine, tokenizer, several)
    assert first == second and len(set(first)) > 1
    assert all(re.fullmatch("[0-9]{8}", each) for each in first)


def test_an_answer_that_is_cut_off_ends_with_length_and_has_no_call(engine, tokenizer):
    async def short(client: AsyncOpenAI, messages: list[Any]) -> Any:
        options: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 4}
        called = await client.chat.completions.create(tools=TOOLS, tool_choice="required", **options)
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
        return called, await client.chat.completions.create(response_format=form, **options)

    _, answers = play(engine, tokenizer, short)
    for answer in answers:
        (choice,) = answer.choices
        assert choice.finish_reason == "length" and not choice.message.tool_calls and choice.message.content


BAD: dict[str, dict[str, Any]] = {
    "type": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}},
    "reference": {"extra_body": {"guided_json": {"$ref": "#/$defs/nothing"}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "("}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}},
    "tools": {"tools": TOOLS, "extra_body": {"guided_regex": "a"}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_form_that_cannot_be_kept_is_refused_before_a_token_is_drawn(name, engine, tokenizer):
    async def asks(client: AsyncOpenAI, messages: list[Any]) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages, **BAD[name])
        return refused.value

    sample, error = play(engine, tokenizer, asks)
    assert ("cannot call a tool" if name == "tools" else "cannot keep an answer to this form") in str(error)
    assert sample.num_turns == 0 and sample.agent_counts["refused"] == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"temperature": 0.7}, "temperature=0.7"), ({"top_p": 0.9}, "top_p=0.9"), ({"bad_words": ("x",)}, "1 bad_words")],
)
def test_training_needs_the_policys_own_distribution(changes, told, engine, tokenizer):
    async def asks(client: AsyncOpenAI, messages: list[Any]) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.parse(model="policy", messages=messages, response_format=Verdict)
        return refused.value

    _, error = play(engine, tokenizer, asks, sampling=changes)
    assert told in str(error) and not engine.asked


def test_other_backends_refuse_a_form_and_name_the_one_that_keeps_it(process, tokenizer):
    async def asks(client: AsyncOpenAI, messages: list[Any]) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, tool_choice="required")
        return refused.value

    _, error = play(ProcessEngine(process, "hf"), tokenizer, asks)
    assert "policy.generation.backend=hf" in str(error) and "backend=vllm" in str(error)
