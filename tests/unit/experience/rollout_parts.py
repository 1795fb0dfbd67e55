"""A scripted engine and environment, so that rollouts are tested without processes."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    VersionSpan,
)


class ScriptedEngine(GenerationInterface):
    """Answers each request with what `script` makes of it; the seed decides how long it takes."""

    def __init__(self, script: Callable[[GenerationRequest], list[int]], weight_version: int = 7):
        self.script = script
        self.weight_version = weight_version
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        await asyncio.sleep((request.seed % 5) / 1000)
        ids = self.script(request)
        limit = request.sampling.max_new_tokens
        reason = "length" if len(ids) > limit else "stop"
        ids = ids[:limit]
        arrays = np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)
        return GenerationResult(*arrays, reason, [VersionSpan(0, self.weight_version)])

    def shutdown(self) -> None:
        pass


class ScriptedEnvironment:
    """Calls `judge(messages, metadata)` for every turn; `opened` and `closed` list the metadata of episodes."""

    post_processes_groups = False
    reads_chat = False
    continues_episodes = True
    agent_section = None

    def __init__(self, judge: Callable[[list[dict[str, Any]], Any], StepResult]):
        self.judge = judge
        self.num_steps = 0
        self.opened: list[Any] = []
        self.closed: list[Any] = []
        self.batches: list[BatchedDataDict[Any]] = []

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        self.opened.append(metadata)
        return EpisodeStart(metadata)

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        self.num_steps += 1
        return self.judge(message_log, metadata)

    async def close_episode(self, metadata: Any) -> None:
        self.closed.append(metadata)

    async def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float | int]]:
        self.batches.append(batch)
        return batch, {}


class LetterTokenizer:
    """One token per character: id = code point."""

    eos_token_id = 0
    pad_token_id = 0
    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)

    def __call__(self, text: str, add_special_tokens: bool = False, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def prompts(*texts: str, **columns: list[Any]) -> BatchedDataDict[Any]:
    """Collated prompts with the environment `game`."""
    size = len(texts)
    ids = [torch.tensor([ord(c) for c in text]) for text in texts]
    batch: dict[str, Any] = {
        "message_log": [
            [{"role": "user", "content": text, "token_ids": row}] for text, row in zip(texts, ids, strict=True)
        ],
        "length": torch.tensor([len(row) for row in ids]),
        "loss_multiplier": torch.ones(size),
        "extra_env_info": [{"ground_truth": text} for text in texts],
        "task_name": ["game"] * size,
        "idx": list(range(100, 100 + size)),
        "stop_strings": [None] * size,
    }
    return BatchedDataDict(batch | columns)


def graded(reward: float | dict[str, float] | None, *, error: str | None = None, **changes: Any) -> StepResult:
    """A last step."""
    result: dict[str, Any] = {
        "observation": {"role": "environment", "content": "done"},
        "metadata": None,
        "reward": reward,
        "terminated": True,
        "error": error,
    }
    return StepResult(**(result | changes))
