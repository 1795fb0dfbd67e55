"""An environment that waits a moment in each step, writes how many episodes are open, and rewards texts at random."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart


class Parity(EnvironmentInterface[dict]):
    """Rewards a conversation if its hash is even; the file `log` of its section gets a line for each episode."""

    def __init__(self, cfg: dict):
        self.log = Path(cfg["log"])
        self.open: set[int] = set()

    async def open_episode(self, metadata: dict) -> EpisodeStart[dict]:
        self.open.add(metadata["episode_seed"])
        with self.log.open("a") as file:
            file.write(f"{len(self.open)}\n")
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
