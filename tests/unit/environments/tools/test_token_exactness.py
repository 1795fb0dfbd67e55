"""In episodes with tools the trained tokens are the sampled ones, and their log-probs equal a teacher-forced pass."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import RandomModelEngine, teacher_forced
from transformers import AutoTokenizer

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import math_hf_data_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult, split_return
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Outcome
from nemo_rl.kits.tools.environment import ToolEnvironment
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.sandbox import why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER

ROOT = Path(__file__).resolve().parents[4]
SHARED = ROOT / "../shared/data/tokenizers"
ASSETS = ROOT / "tests/assets/tokenizers"
TEMPLATES = {
    "minimind": (ASSETS / "minimind", None),
    "qwen3": (ASSETS / "qwen3", None),
    "qwen3-base": (SHARED / "qwen3", "base.tokenizer_config.json"),
    "qwen2.5": (SHARED / "qwen3", "qwen2.5.tokenizer_config.json"),
    "tiny-tools": (ROOT / "examples/assets/tiny-tools", None),
}
"""Folder of the tokenizer, and another file with its chat template."""
NO_SANDBOX = all(why_unavailable(one) for one in IN_ORDER)
NUM_EPISODES = 16
MAX_TURNS = 4


class DirectEnvironment:
    """A `ToolEnvironment` in this process."""

    post_processes_groups = False
    reads_chat = False
    continues_episodes = False
    agent_section = None
    reads_collections = False

    def __init__(self, environment: ToolEnvironment) -> None:
        self.environment = environment

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        return await self.environment.open_episode(metadata)

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        return split_return(await self.environment.step([message_log], [metadata]), 1, "tools")[0]

    async def close_episode(self, metadata: Any) -> None:
        await self.environment.close_episode(metadata)

    async def global_post_process_and_metrics(self, batch: Any) -> Any:
        return await self.environment.global_post_process_and_metrics(batch)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def tokenizer_of(name: str, tmp_path: Path) -> Path:
    folder, other = TEMPLATES[name]
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    if other is None:
        return folder
    copy = tmp_path / name
    copy.mkdir()
    for file in ("vocab.json", "merges.txt"):
        (copy / file).write_bytes((folder / file).read_bytes())
    (copy / "tokenizer_config.json").write_bytes((folder / other).read_bytes())
    return copy


def calls_for(name: str) -> list[str]:
    """Return right calls and broken ones in the format of a template."""
    if name == "tiny-tools":
        return [
            '[calculator(expression="12*34")]',
            '[calculator(expression="1/0")]',
            '[python(code="print(6 * 7)\\n1 / 0")]',
            '[calc(x="é\\n")]',
            "[calculator(",
        ]
    texts = [{"expression": "12*34"}, {"expression": "1/0"}, {"other": "<|im_end|> ünïcödé 漢字"}, {"expression": 3}]
    calls = [json.dumps({"name": "calculator", "arguments": each}, ensure_ascii=False) for each in texts]
    calls.append(json.dumps({"name": "python", "arguments": {"code": "print('<|im_end|>', 6 * 7)\n1 / 0"}}))
    return [
        f"<tool_call>\n{call}\n</tool_call>\n"
        for call in [*calls, '{"name": "calc', '{"name": "none", "arguments": {}}']
    ]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_trained_tokens_are_the_sampled_ones(name: str, tmp_path: Path, loop: EventLoopThread) -> None:
    folder = tokenizer_of(name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    keys = {"name": str(folder), "chat_template": "default", "chat_template_kwargs": None}
    tools = [{"name": "calculator"}, *([] if NO_SANDBOX else [{"name": "python"}])]
    environment = ToolEnvironment({"tools": tools, "tokenizer": keys})
    engine = RandomModelEngine(tokenizer, calls_for(name))
    limits = RolloutLimits(max_sequence_length=3000, max_turns=MAX_TURNS, timeout_s=200.0)
    runner = RolloutRunner(engine, {"tools": DirectEnvironment(environment)}, tokenizer, limits, loop)  # type: ignore[arg-type]
    schemas = [spec.schema for spec in environment._specs.values()]
    spec = TaskDataSpec("tools", tools=schemas)
    rows = [
        math_hf_data_processor(
            {
                "messages": [{"role": "user", "content": f"{n}*{n}="}, {"role": "assistant", "content": str(n * n)}],
                "task_name": "tools",
            },
            spec,
            tokenizer,
            3000,
            n,
        )
        for n in range(NUM_EPISODES // 2)
    ]
    sampling = SamplingParams(max_new_tokens=500, stop_token_ids=(tokenizer.eos_token_id,))
    rollouts = runner.collect(rl_collate_fn(rows), 2, sampling, RolloutKey(1, "train", 0))
    found = rollouts.trajectories
    assert len(found) == NUM_EPISODES
    assert {t.outcome for t in found} == {Outcome.FINISHED}, [t.error for t in found]
    assert sum(t.num_turns for t in found) >= 1.5 * NUM_EPISODES
    assert rollouts.metrics["tools/tool_calls"] > NUM_EPISODES / 2
    assert rollouts.metrics["tools/invalid_tool_calls"] > 0

    batch: BatchedDataDict[Any] = build_training_batch(found, tokenizer.pad_token_id or 0, mask_truncated=False)
    sampled = {(tuple(prompt), tuple(written)) for prompt, written in engine.sampled}
    for row, trajectory in enumerate(found):
        ids = batch["input_ids"][row].tolist()
        trained = [position for position, counts in enumerate(batch["token_mask"][row].tolist()) if counts]
        expected: list[int] = []
        for start, end in trajectory.turn_spans:
            # The engine saw exactly the tokens before the turn, and wrote exactly those of the turn.
            assert (tuple(ids[:start]), tuple(ids[start:end])) in sampled
            expected += range(start, end)
        assert trained == expected
    for row in range(NUM_EPISODES):
        positions = batch["token_mask"][row].nonzero()[:, 0]
        forced = teacher_forced(engine.model, batch["input_ids"][row, : batch["input_lengths"][row]], positions)
        sampled_logprobs = batch["generation_logprobs"][row, positions].double()
        torch.testing.assert_close(sampled_logprobs, forced, rtol=0, atol=2e-6)
    asyncio.run(environment.shutdown())
