"""In random sessions the trained tokens are the sampled ones, and none is lost or trained twice."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_parts import ROOT, TOKENIZERS, ProgramEnvironment, play
from openai import AsyncOpenAI
from random_model import RandomModelEngine, teacher_forced
from transformers import AutoTokenizer

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.trajectory import Trajectory

SHARED = ROOT / "../shared/data/tokenizers"
TEMPLATES = {
    "minimind": (TOKENIZERS / "minimind", None),
    "qwen3": (TOKENIZERS / "qwen3", None),
    "qwen3-base": (SHARED / "qwen3", "base.tokenizer_config.json"),
    "qwen2.5": (SHARED / "qwen3", "qwen2.5.tokenizer_config.json"),
    "tiny-tools": (ROOT / "examples/assets/tiny-tools", None),
}
"""Folder of the tokenizer, and another file with its chat template."""
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class LossyTransport(httpx.AsyncHTTPTransport):
    """Loses some responses after the server has sent them, so that the client sends its request again."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.num_lost = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        is_first = request.headers.get("x-stainless-retry-count") == "0"
        if is_first and self.rng.random() < 0.2:
            await response.aread()
            self.num_lost += 1
            raise httpx.ReadError("lost", request=request)
        return response


class RandomProgram:
    """Makes random calls: longer histories, edited ones, parallel ones, streams, tools, several answers."""

    def __init__(self, uses_tools: bool) -> None:
        self.uses_tools = uses_tools
        self.counts: Counter[str] = Counter()

    async def __call__(self, task: Mapping[str, Any]) -> float:
        rng = random.Random(task["seed"])
        transport = LossyTransport(rng)
        http = httpx.AsyncClient(transport=transport, timeout=60)
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], http_client=http) as client:
            messages = list(task["messages"])
            for _ in range(rng.randint(1, 5)):
                messages = await self._act(client, messages, rng)
        self.counts["lost"] += transport.num_lost
        return rng.random()

    async def _act(self, client: AsyncOpenAI, messages: list[Any], rng: random.Random) -> list[Any]:
        action = rng.choice(["go on", "go on", "stream", "parallel", "edit", "summary", "several"])
        self.counts[action] += 1
        if action == "edit" and len(messages) > 2:
            messages = [*messages[:-2], {"role": "user", "content": f"instead {rng.random()}"}]
        if action == "summary":
            messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": f"so far {len(messages)}"}]
        if action == "parallel":
            histories = [[*messages, {"role": "user", "content": f"part {n}"}] for n in range(rng.randint(2, 3))]
            answers = await asyncio.gather(*(self._call(client, each, rng) for each in histories))
            number = rng.randrange(len(histories))
            return self._next(histories[number], answers[number], rng)
        answer = await self._call(client, messages, rng, stream=action == "stream", n=2 if action == "several" else 1)
        return self._next(messages, answer, rng)

    async def _call(
        self, client: AsyncOpenAI, messages: list[Any], rng: random.Random, *, stream: bool = False, n: int = 1
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"tools": [TOOL]} if self.uses_tools else {}
        self.counts["answers"] += n
        if stream:
            parts = await client.chat.completions.create(model="policy", messages=messages, stream=True, **options)
            return _joined([part async for part in parts])
        answers = await client.chat.completions.create(model="policy", messages=messages, n=n, **options)
        return rng.choice(answers.choices).message.model_dump(exclude_none=True)

    def _next(self, messages: list[Any], answer: dict[str, Any], rng: random.Random) -> list[Any]:
        calls = answer.get("tool_calls") or []
        self.counts["tool_calls"] += len(calls)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"<|im_end|> {rng.random()}"} for call in calls
        ]
        return [*messages, answer, *(results or [{"role": "user", "content": f"next ünï {rng.randint(0, 99)}"}])]


def _joined(chunks: list[Any]) -> dict[str, Any]:
    """Join the chunks of a stream as programs do."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    return {**message, "tool_calls": list(calls.values())} if calls else message


def tokenizer_of(name: str, tmp_path: Path) -> Any:
    folder, other = TEMPLATES[name]
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    if other is not None:
        copy = tmp_path / name
        copy.mkdir()
        for file in ("vocab.json", "merges.txt"):
            (copy / file).write_bytes((folder / file).read_bytes())
        (copy / "tokenizer_config.json").write_bytes((folder / other).read_bytes())
        folder = copy
    return AutoTokenizer.from_pretrained(folder)


def calls_for(name: str) -> list[str]:
    if name == "tiny-tools":
        return [*['[calculator(expression="12*34")]'] * 3, "[calculator("]
    right = json.dumps({"name": "calculator", "arguments": {"expression": "12*34"}})
    return [*[f"<tool_call>\n{right}\n</tool_call>\n"] * 3, '<tool_call>\n{"name": "calc\n</tool_call>\n']


def check(engine: RandomModelEngine, samples: list[Trajectory], pad: int) -> float:
    """Compare all rows with what the engine has sampled; return the largest difference of log-probabilities."""
    rows = rows_of(samples)
    batch = build_training_batch(rows, pad, mask_truncated=False)
    trained: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    worst = 0.0
    for number, row in enumerate(rows):
        ids = batch["input_ids"][number]
        for start, end in row.turn_spans:
            trained[tuple(ids[:start].tolist()), tuple(ids[start:end].tolist())] += 1
        positions = batch["token_mask"][number].nonzero()[:, 0]
        assert len(positions) == sum(end - start for start, end in row.turn_spans)
        if len(positions):
            forced = teacher_forced(engine.model, ids[: batch["input_lengths"][number]], positions)
            worst = max(worst, float((batch["generation_logprobs"][number, positions] - forced).abs().max()))
    assert trained == Counter((tuple(prompt), tuple(written)) for prompt, written in engine.sampled)
    return worst


CASES = [
    *((name, 6) for name in ("minimind", "qwen3", "tiny-tools")),
    *(pytest.param(name, 40, marks=pytest.mark.long) for name in TEMPLATES),
]


@pytest.mark.parametrize(("name", "num_sessions"), CASES)
def test_each_sampled_token_is_trained_once(name: str, num_sessions: int, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    engine = RandomModelEngine(tokenizer, calls_for(name))
    program = RandomProgram(uses_tools=True)
    samples = play(engine, ProgramEnvironment(program), tokenizer, prompts=num_sessions // 2, samples=2)
    assert len(samples) == num_sessions
    assert [sample.error for sample in samples] == [None] * num_sessions
    assert sum(sample.agent_counts["calls"] for sample in samples) == program.counts["answers"] == len(engine.sampled)
    assert sum(sample.agent_counts["retries"] for sample in samples) == program.counts["lost"] > 0
    assert program.counts["tool_calls"] > 0
    assert sum(len(sample.branches) for sample in samples) > 0
    assert check(engine, samples, tokenizer.pad_token_id or 0) < 1e-5
