"""An environment that waits a moment in each step, counts the episodes that are open, and rewards texts at random."""

import asyncio
import hashlib
from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart


class Parity(EnvironmentInterface[dict]):
    """Rewards a conversation if its hash is even."""

    def __init__(self, cfg: dict):
        self.open: set[int] = set()
        self.most_open = 0

    async def open_episode(self, metadata: dict) -> EpisodeStart[dict]:
        self.open.add(metadata["episode_seed"])
        self.most_open = max(self.most_open, len(self.open))
        return EpisodeStart(metadata)

    async def close_episode(self, metadata: dict) -> None:
        self.open.discard(metadata["episode_seed"])

    async def step(self, message_log_batch: list[Any], metadata: list[dict]) -> EnvironmentReturn[dict]:
        await asyncio.sleep(0.02)
        texts = ["".join(message["content"] for message in log) for log in message_log_batch]
        even = [hashlib.sha256(text.encode()).digest()[0] % 2 == 0 for text in texts]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"}] * len(texts),
            metadata=list(metadata),
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor(even, dtype=torch.float32),
            terminateds=torch.ones(len(texts), dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float | int]]:
        return batch, {"most_open_episodes": self.most_open}
