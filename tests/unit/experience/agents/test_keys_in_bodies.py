"""Requests of servers that have one API key for all samples, as those of NeMo Gym."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from agent_parts import TOKENIZERS, ProgramEnvironment, play
from random_model import RandomModelEngine
from transformers import AutoTokenizer

HI = [{"role": "user", "content": "Hi"}]
GYM = {"authorization": "Bearer nemo_rl"}
EXACT = {"logprobs": True, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")


def ask(tokenizer: Any, asking: Any, *, samples: int = 1, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Play samples whose program gets a client with the key of NeMo Gym's servers; return what the programs saw."""
    seen: list[Any] = []

    async def program(task: Mapping[str, Any]) -> float:
        base = task["base_url"].removesuffix("/v1")
        async with httpx.AsyncClient(base_url=base, headers=GYM, timeout=30) as client:
            seen.append(await asking(client, task["api_key"]))
        return 1.0

    engine = RandomModelEngine(tokenizer, [])
    return seen, play(engine, ProgramEnvironment(program), tokenizer, samples=samples, **options), engine


def bodies(key: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests with a key in the body, in each place that it may have."""
    metadata = {"extra_body": json.dumps({"nemo_rl_key": key, "seed": 3})}
    return [
        ("/v1/chat/completions", {"messages": HI, "nemo_rl_key": key}),
        ("/v1/chat/completions", {"messages": HI, "metadata": metadata}),
        ("/v1/responses", {"input": HI, "metadata": metadata}),
        ("/v1/responses", {"input": "Hi", "nemo_rl_key": key}),
        ("/tokenize", {"messages": HI, "nemo_rl_key": key}),
    ]


def test_a_key_in_the_body_is_the_key_of_its_sample(tokenizer: Any) -> None:
    async def all_places(client: httpx.AsyncClient, key: str) -> list[int]:
        return [(await client.post(path, json=body)).status_code for path, body in bodies(key)]

    seen, samples, _ = ask(tokenizer, all_places, samples=2)
    assert seen == [[200] * 5] * 2
    assert [sample.num_turns for sample in samples] == [4, 4]


@pytest.mark.parametrize("key", ["", "sk-wrong", None, 5, ["x"], {"a": 1}])
def test_a_wrong_key_in_the_body_is_refused(tokenizer: Any, key: Any) -> None:
    async def refused(client: httpx.AsyncClient, _: str) -> list[int]:
        found = [(await client.post(path, json=body)).status_code for path, body in bodies(key)]
        extra: list[Any] = ["{", "[]", "5", 5, None]
        for text in extra:
            body = {"input": "Hi", "metadata": {"extra_body": text}}
            found.append((await client.post("/v1/responses", json=body)).status_code)
        found.append((await client.post("/v1/responses", content=b"{")).status_code)
        large = {"messages": [{"role": "user", "content": "x" * 300_000}]}
        return [*found, (await client.post("/v1/chat/completions", json=large)).status_code]

    seen, (sample,), _ = ask(tokenizer, refused, max_request_mb=0.1)
    assert seen == [[401] * 12] and sample.num_turns == 0


def test_answers_have_their_tokens_as_ids(tokenizer: Any) -> None:
    """The fields are those that the engine got and sampled, and a history with them continues the conversation."""

    async def converse(client: httpx.AsyncClient, key: str) -> list[Any]:
        given = {"nemo_rl_key": key, **EXACT}
        chat = (await client.post("/v1/chat/completions", json={"messages": HI, **given})).json()["choices"][0]
        history = [*HI, chat["message"], {"role": "user", "content": "More"}]
        second = (await client.post("/v1/chat/completions", json={"messages": history, **given})).json()["choices"][0]
        items = (await client.post("/v1/responses", json={"input": HI, **given})).json()["output"]
        plain = (await client.post("/v1/chat/completions", json={"messages": HI, "nemo_rl_key": key})).json()
        return [chat, second, items, plain["choices"][0]["message"]]

    ((chat, second, items, plain),), (sample,), engine = ask(tokenizer, converse)
    for message, (prompt, sampled) in zip(
        (chat["message"], second["message"], items[-1]), engine.sampled, strict=False
    ):
        assert message["prompt_token_ids"] == prompt and message["generation_token_ids"] == sampled
        assert len(message["generation_log_probs"]) == len(sampled) and all(
            x < 0 for x in message["generation_log_probs"]
        )
    tokens = chat["logprobs"]["content"]
    assert [token["token"] for token in tokens] == [f"token_id:{each}" for each in engine.sampled[0][1]]
    assert [token["logprob"] for token in tokens] == chat["message"]["generation_log_probs"]
    first_prompt, first_sampled = engine.sampled[0]
    assert engine.sampled[1][0][: len(first_prompt) + len(first_sampled)] == first_prompt + first_sampled
    assert not {"prompt_token_ids", "generation_token_ids", "generation_log_probs"} & plain.keys()
    assert sample.agent_counts["calls"] == 4
