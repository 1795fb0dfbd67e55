"""An environment for products of two digits, next to the built-in one for sums."""

from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class Products(EnvironmentInterface[dict]):
    """Rewards an answer that is the known one in a box."""

    def __init__(self, cfg: dict):
        pass

    async def step(self, message_log_batch: list[Any], metadata: list[dict]) -> EnvironmentReturn[dict]:
        right = [
            log[-1]["content"].strip().endswith(f"\\boxed{{{known['ground_truth']}}}")
            for log, known in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"}] * len(right),
            metadata=list(metadata),
            next_stop_strings=[None] * len(right),
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.ones(len(right), dtype=torch.bool),
        )
