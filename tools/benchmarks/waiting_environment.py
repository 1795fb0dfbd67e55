"""An environment that waits before each answer, as tools, judges and sandboxes do."""

import asyncio
import math
import random
from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart

SIGMA = 1.0
"""Standard deviation of the logarithm of a wait."""


class WaitingEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Each sample waits for its own log-normal time in each turn; the last turn is rewarded if it holds the answer.

    Args:
        cfg: `mean_s`, mean seconds of a wait; `num_turns`, turns of an episode.
    """

    steps_samples_alone = True
    max_concurrent_steps = 1000

    def __init__(self, cfg: dict[str, Any]) -> None:
        self._location = math.log(cfg["mean_s"]) - SIGMA**2 / 2
        self._num_turns = cfg["num_turns"]
        self._random = random.Random(0)

    def open_episode(self, metadata: dict[str, Any]) -> EpisodeStart[dict[str, Any]]:
        """Count turns from 0."""
        return EpisodeStart({**metadata, "turns": 0})

    async def step(  # type: ignore[override]
        self, message_log_batch: list[Any], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Wait, and reward the sample if it is its last turn."""
        await asyncio.sleep(self._random.lognormvariate(self._location, SIGMA))
        states = [{**state, "turns": state["turns"] + 1} for state in metadata]
        is_last = [state["turns"] == self._num_turns for state in states]
        found = [
            state["ground_truth"] in log[-1]["content"] for log, state in zip(message_log_batch, states, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "Again."}] * len(states),
            metadata=states,
            next_stop_strings=[None] * len(states),
            rewards=torch.tensor([float(hit and last) for hit, last in zip(found, is_last, strict=True)]),
            terminateds=torch.tensor(is_last),
        )
