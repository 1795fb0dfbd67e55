"""The same conversation of several turns as an environment, and as programs that call the endpoint."""

from functools import cache
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from nemo_rl.agents.programs.interfaces import AgentTask
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart

AGAIN = "Again."


class SeveralTurns(EnvironmentInterface[dict[str, Any]]):
    """Asks again until the last turn, and rewards nothing.

    Args:
        cfg: `num_turns`, turns of an episode.
    """

    steps_samples_alone = True
    max_concurrent_steps = 1000

    def __init__(self, cfg: dict[str, Any]) -> None:
        self._num_turns = cfg["num_turns"]

    def open_episode(self, metadata: dict[str, Any]) -> EpisodeStart[dict[str, Any]]:
        """Count turns from 0."""
        return EpisodeStart({**metadata, "turns": 0})

    async def step(  # type: ignore[override]
        self, message_log_batch: list[Any], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Ask again; B is 1."""
        states = [{**state, "turns": state["turns"] + 1} for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": AGAIN}],
            metadata=states,
            next_stop_strings=[None],
            rewards=torch.zeros(1),
            terminateds=torch.tensor([state["turns"] == self._num_turns for state in states]),
        )


async def converse(task: AgentTask, num_turns: int) -> float:
    """Ask again until the last turn, and return no reward."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=connections())
    messages: list[Any] = list(task.messages)
    for _ in range(num_turns):
        completion = await client.chat.completions.create(model=task.model, messages=messages)
        messages = [
            *messages,
            {"role": "assistant", "content": completion.choices[0].message.content},
            {"role": "user", "content": AGAIN},
        ]
    return 0.0


async def converse_plainly(task: AgentTask, num_turns: int) -> float:
    """Do the same as `converse` with requests that this function writes and reads itself."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    messages: list[Any] = list(task.messages)
    for _ in range(num_turns):
        body = {"model": task.model, "messages": messages}
        answer = await connections().post(f"{task.base_url}/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        content = answer.json()["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": AGAIN}]
    return 0.0


@cache
def connections() -> httpx.AsyncClient:
    """Return the connections that all samples share."""
    return DefaultAsyncHttpxClient()
