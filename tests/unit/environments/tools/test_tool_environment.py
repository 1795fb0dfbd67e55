"""The environment makes calls, tells the model what was wrong with them, counts, and lets another one grade."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nemo_rl.algorithms.credit.turns import set_invalid_tool_calls
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.kits.tools.environment import ToolEnvironment

TOKENIZER = str(Path(__file__).resolve().parents[4] / "tests/assets/tokenizers/qwen3")
KEYS = {"name": TOKENIZER, "chat_template": "default", "chat_template_kwargs": None}


@pytest.fixture(scope="module")
def environment() -> Iterator[ToolEnvironment]:
    grader = {"name": "math", "kwargs": {"num_workers": 1}}
    made = ToolEnvironment(
        {"tools": [{"name": "calculator"}], "tokenizer": KEYS, "grader": grader, "max_calls_per_turn": 2}
    )
    yield made
    asyncio.run(made.shutdown())


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


RIGHT = call("calculator", '{"expression": "6*7"}')


@pytest.mark.parametrize(
    ("text", "said", "counts"),
    [
        (RIGHT, ["42"], {"tool_calls": 1}),
        (
            RIGHT + call("search", "{}"),
            ["42", "Error: there is no tool 'search'; there are: calculator"],
            {"tool_calls": 2, "invalid_tool_calls": 1, "unknown_tools": 1},
        ),
        (
            call("calculator", '{"formula": "1"}'),
            ["Error: calculator: expression: Field required; formula: Extra inputs are not permitted"],
            {"tool_calls": 1, "invalid_tool_calls": 1, "wrong_arguments": 1},
        ),
        (
            RIGHT.replace("}}", "}"),
            ["Error: the tool call cannot be read"],
            {"tool_calls": 1, "invalid_tool_calls": 1, "malformed_tool_calls": 1},
        ),
        (
            call("calculator", '{"expression": "1/0"}'),
            ["Error: ZeroDivisionError: Fraction(1, 0)"],
            {"tool_calls": 1, "tool_errors": 1},
        ),
        (
            RIGHT * 3,
            ["42", "42", "Error: only 2 calls are allowed in one turn"],
            {"tool_calls": 3, "invalid_tool_calls": 1, "malformed_tool_calls": 1},
        ),
    ],
)
def test_calls_become_messages_and_counts(
    environment: ToolEnvironment, text: str, said: list[str], counts: dict[str, int]
) -> None:
    async def play() -> Any:
        start = await environment.open_episode({"ground_truth": "42"})
        result = await environment.step([[turn(text)]], [start.metadata])
        (state,) = result.metadata
        final = await environment.step([[turn(text), turn("\\boxed{42}")]], [state])
        await environment.close_episode(final.metadata[0])
        return result, final

    result, final = asyncio.run(play())
    assert [message["content"] for message in result.observations[0]["messages"]] == said
    assert {name: count for name, count in result.metadata[0]["counts"].items() if count} == counts
    assert result.invalid_tool_calls == ["invalid_tool_calls" in counts]
    assert (result.rewards.tolist(), result.terminateds.tolist()) == ([0.0], [False])
    assert (final.rewards.tolist(), final.terminateds.tolist()) == ([1.0], [True])
    assert environment._episodes == {}


def test_an_episode_whose_tools_are_lost_is_an_error_and_metrics_are_sums(environment: ToolEnvironment) -> None:
    async def play() -> Any:
        start = await environment.open_episode({"ground_truth": "42"})
        lost = await environment.step([[turn(RIGHT)]], [{**start.metadata, "episode": "another process"}])
        called = await environment.step([[turn(RIGHT)]], [start.metadata])
        states = [called.metadata[0], start.metadata]
        batch: BatchedDataDict[Any] = BatchedDataDict(
            rewards=torch.tensor([1.0, 0.0]),
            is_end=torch.ones(2, dtype=torch.int64),
            generation_lengths=torch.tensor([3, 4]),
            prompt_lengths=torch.tensor([3, 4]),
            text=["a", "b"],
            extra_env_info=states,
        )
        _, metrics = await environment.global_post_process_and_metrics(batch)
        await environment.close_episode(start.metadata)
        return lost, metrics

    lost, metrics = asyncio.run(play())
    assert "process of the environment `tools` died" in lost.errors[0]
    assert (metrics["tool_calls"], metrics["share_with_tool_calls"], metrics["accuracy"]) == (1, 0.5, 0.5)


@pytest.mark.fast
def test_messages_of_several_calls_follow_the_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    prompt = torch.tensor(tokenizer("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    answer = torch.tensor(tokenizer("two calls<|im_end|>")["input_ids"])
    log = [{"role": "user", "token_ids": prompt}, {"role": "assistant", "token_ids": answer}]
    messages = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    observation = {"role": "tool", "content": "one\ntwo", "messages": messages}
    ids = ObservationRenderer(tokenizer).token_ids(observation, log, len(prompt))
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.fast
def test_the_advantage_of_invalid_turns_is_replaced_where_tokens_count() -> None:
    def tokens(count: int, *, written: bool) -> dict[str, Any]:
        return {"token_ids": torch.zeros(count)} | ({"generation_logprobs": torch.zeros(count)} if written else {})

    log = [tokens(2, written=False), tokens(2, written=True), tokens(1, written=False), tokens(3, written=True)]
    first = Trajectory(0, 0, 0, "tools", log, 2, invalid_tool_call_turns=[True, False])
    second = Trajectory(0, 1, 0, "tools", log, 2, invalid_tool_call_turns=[False, True])
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 0]])
    advantages = 0.5 * mask
    set_invalid_tool_calls(advantages, mask, [first, second], -2.0)
    assert advantages.tolist() == [[0, 0, -2, -2, 0, 0.5, 0.5, 0.5], [0, 0, 0.5, 0.5, 0, -2, -2, 0]]


def turn(text: str) -> dict[str, Any]:
    ids = AutoTokenizer.from_pretrained(TOKENIZER)(f"{text}<|im_end|>")["input_ids"]
    return {"role": "assistant", "content": text, "token_ids": torch.tensor(ids)}
