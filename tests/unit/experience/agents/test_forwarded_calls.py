"""Programs of an evaluation at an endpoint: their calls are forwarded, and they see neither its address nor its key."""

import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from agent_parts import ProgramEnvironment, play
from anthropic import AsyncAnthropic
from chat_server import KEY, ChatServer, completion, echo, endpoint_config
from openai import AsyncOpenAI
from starlette.responses import JSONResponse, Response

from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.models.generation.remote.chats import text_tokenizer
from nemo_rl.models.generation.remote.model import ChatModel
from nemo_rl.utils.errors import EndpointUnusableError

CALL = {"id": "call-of-server-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def play_at(server: ChatServer, program: Any, section: Mapping[str, Any] | None = None, **keys: Any) -> Trajectory:
    tokenizer = text_tokenizer()
    model = ChatModel(endpoint_config(server, max_attempts=2, **keys), tokenizer)
    (sample,) = play(model, ProgramEnvironment(program, **(section or {})), tokenizer)
    return sample


def client_of(task: Mapping[str, Any], **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], **options)


def test_a_conversation_with_tools_reaches_the_server_and_its_key_stays(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", KEY)
    seen: list[Any] = []

    async def program(task: Mapping[str, Any]) -> float:
        seen.append(dict(task))
        async with client_of(task) as client:
            messages = list(task["messages"])
            first = await client.chat.completions.create(model=task["model"], messages=messages, tools=TOOLS)
            (call,) = first.choices[0].message.tool_calls or ()
            messages += [first.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"}]
            last = await client.chat.completions.create(
                model="any", messages=messages, tools=TOOLS, max_tokens=11, stop=["END"]
            )
        seen.append(last)
        return 1.0

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(body["messages"]) == 1:
            thought = {"tool_calls": [CALL], "reasoning_content": "let me add"}
            return completion(None, "tool_calls", 9, message=thought)
        return completion("It is 2. ", stop_reason="END")

    with ChatServer(answer) as server:
        sample = play_at(server, program, {"tool_parser": "hermes", "reasoning_parser": "qwen3"}, api_key_env="SECRET")
    task, last = seen
    assert (sample.reward, sample.outcome, sample.num_turns) == (1.0, Outcome.FINISHED, 2), sample.error
    assert (sample.response_length, sample.agent_counts["calls"]) == (12, 2.0)
    assert sample.agent_counts["unlike_template"] == 0.0 and not sample.branches
    assert server.url not in task["base_url"] and KEY not in json.dumps(task) and task["model"] == "policy"
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert [body["model"] for body in server.bodies] == ["tiny", "tiny"]
    assert server.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": CALL["id"]},
    ]
    assert (server.bodies[1]["max_tokens"], server.bodies[1]["stop"]) == (11, ["END"])
    assert server.bodies[0]["tools"] == TOOLS and server.bodies[0]["seed"] != server.bodies[1]["seed"]
    assert last.choices[0].message.content == "It is 2. "
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 3)


def test_another_dialect_is_forwarded_too() -> None:
    async def program(task: Mapping[str, Any]) -> float:
        base = task["base_url"].removesuffix("/v1")
        async with AsyncAnthropic(base_url=base, api_key=task["api_key"]) as client:
            answer = await client.messages.create(
                model="any", max_tokens=50, system="Be brief.", messages=[{"role": "user", "content": "hi"}]
            )
        assert answer.content[0].type == "text" and answer.content[0].text == "you said hi"
        return float(answer.usage.output_tokens == 3)

    with ChatServer(echo) as server:
        sample = play_at(server, program)
    assert sample.reward == 1.0, sample.error
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "hi"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "be"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        ("tokenize", {"prompt": "hi"}),
    ],
)
def test_what_needs_the_models_tokens_is_refused(path: str, body: dict[str, Any]) -> None:
    async def program(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            with pytest.raises(openai.BadRequestError, match="another server"):
                await client.post(f"/{path}", body={"model": "any", **body}, cast_to=object)
        return 1.0

    with ChatServer(echo) as server:
        assert play_at(server, program).reward == 1.0
        assert server.bodies == []


def test_a_demanded_form_is_passed_on_and_a_forced_call_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def program(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            options: dict[str, Any] = {"model": "any", "messages": list(task["messages"])}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            await client.chat.completions.create(response_format=form, **options)
            await client.chat.completions.create(extra_body={"guided_choice": ["a", "b"]}, **options)
            await client.chat.completions.create(
                tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **options
            )
            await client.chat.completions.create(
                tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}}, **options
            )
        return 1.0

    with ChatServer(echo) as server:
        sample = play_at(server, program)
    assert sample.error is None, sample.error
    formed, chosen, required, named = server.bodies
    assert formed["response_format"]["json_schema"]["schema"] == schema
    assert chosen["structured_outputs"] == {"choice": ["a", "b"]}
    assert (required["tool_choice"], required["parallel_tool_calls"]) == ("required", False)
    assert named["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert not {"response_format", "structured_outputs"} & (required.keys() | named.keys())


async def gives_up(task: Mapping[str, Any]) -> float:
    """A program that takes a missing answer for a wrong one."""
    async with client_of(task) as client:
        try:
            await client.chat.completions.create(model="any", messages=list(task["messages"]))
        except openai.APIError:
            return 0.0
    return 1.0


def test_a_missing_answer_is_an_error_of_the_sample_whatever_the_program_makes_of_it() -> None:
    async def down(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": "down"}, 503)

    with ChatServer(down) as server:
        sample = play_at(server, gives_up)
    assert (sample.reward, sample.outcome) == (None, Outcome.REWARD_ERROR)
    assert "status 503" in str(sample.error) and len(server.bodies) == 2


def test_a_refused_request_is_the_programs_own_affair() -> None:
    refused = JSONResponse({"error": {"message": "This model's maximum context length is 9 tokens."}}, 400)
    with ChatServer(echo, [refused, refused]) as server:
        sample = play_at(server, gives_up)
    assert (sample.reward, sample.outcome, sample.error) == (0.0, Outcome.TRUNCATED, None)
    with ChatServer(echo, [JSONResponse({"error": {"message": "bad tools"}}, 400)]) as server:
        sample = play_at(server, gives_up)
    assert (sample.reward, sample.outcome) == (0.0, Outcome.FINISHED)


def test_a_withheld_answer_is_an_error_of_the_sample_too() -> None:
    withheld = JSONResponse(completion("", finish_reason="content_filter"))
    with ChatServer(echo, [withheld]) as server:
        sample = play_at(server, gives_up)
    assert (sample.reward, sample.outcome) == (None, Outcome.REWARD_ERROR)
    assert "withheld" in str(sample.error) and len(server.bodies) == 1


@pytest.mark.parametrize("status", [400, 413, 503])
def test_a_program_without_an_answer_does_not_see_the_address_of_the_server(status: int) -> None:
    told: list[str] = []

    async def program(task: Mapping[str, Any]) -> float:
        async with client_of(task, max_retries=0) as client:
            with pytest.raises(openai.APIError) as error:
                await client.chat.completions.create(model="any", messages=list(task["messages"]))
        told.append(str(error.value))
        return 1.0

    async def refuse(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "maximum length" if status == 413 else "no"}}, status)

    with ChatServer(refuse) as server:
        play_at(server, program)
    assert len(told) == 1 and "127.0.0.1" not in told[0] and server.url.split(":")[2] not in told[0]


def test_an_endpoint_that_refuses_the_run_ends_it() -> None:
    with (
        ChatServer(echo, [JSONResponse({"error": "no such model"}, 404)]) as server,
        pytest.raises(EndpointUnusableError),
    ):
        play_at(server, gives_up)
