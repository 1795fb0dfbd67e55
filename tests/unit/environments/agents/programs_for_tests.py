"""Agent programs: functions of an `AgentTask`, good ones and bad ones."""

import asyncio
import json
import math
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nemo_rl.agents.programs.interfaces import AgentTask

released = threading.Event()
"""Set by a test to let blocked threads end."""


def call(task: AgentTask, messages: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Call the model once, as any HTTP client would."""
    body = json.dumps({"model": task.model, "messages": list(messages or task.messages)}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def compares(task: AgentTask) -> float:
    return float(call(task)["choices"][0]["message"]["content"] == task.row["ground_truth"])


async def compares_async(task: AgentTask, factor: float = 1.0) -> float:
    return factor * await asyncio.to_thread(compares, task)


class Counting:
    def __init__(self, start: int) -> None:
        self.count = start

    async def __call__(self, task: AgentTask) -> int:
        self.count += 1
        return self.count


class Closing:
    """Notes that it was shut down."""

    closed: list[int] = []

    async def __call__(self, task: AgentTask) -> int:
        return 1

    async def shutdown(self) -> None:
        self.closed.append(1)

    @classmethod
    def one(cls, task: AgentTask) -> int:
        return 1


of_a_class = Closing.one


class NotCallable:
    pass


def details(task: AgentTask) -> dict[str, Any]:
    ids = [call(task)["id"] for _ in range(2)]
    rewards = {"call_rewards": {ids[0]: 0.25, ids[1]: 1}}
    return {"reward": True, "answer": "text", "metrics": {"turns": 2, "tools": task.seed}, **rewards}


def answers(task: AgentTask) -> dict[str, Any]:
    return {"answer": call(task)["choices"][0]["message"]["content"]}


def answers_text(task: AgentTask) -> str:
    return r"It is \boxed{4}"


def shows_row(task: AgentTask) -> dict[str, Any]:
    return {"reward": 1, "answer": ",".join(sorted(task.row))}


def nothing(task: AgentTask) -> None:
    return None


def raises(task: AgentTask) -> float:
    raise LookupError(f"no luck with {task.api_key}")


def exits(task: AgentTask) -> float:
    sys.exit(3)


async def exits_async(task: AgentTask) -> float:
    sys.exit(3)


async def interrupts(task: AgentTask) -> float:
    raise KeyboardInterrupt


class Unusual(BaseException):
    def __str__(self) -> str:
        raise LookupError


def raises_unusual(task: AgentTask) -> float:
    raise Unusual


async def raises_unusual_async(task: AgentTask) -> float:
    raise Unusual


async def raises_group(task: AgentTask) -> float:
    raise BaseExceptionGroup("several", [Unusual(), ValueError()])


async def skips(task: AgentTask) -> float:
    pytest.skip("not now")


async def cancels_its_task(task: AgentTask) -> float:
    inner = asyncio.ensure_future(asyncio.sleep(10))
    inner.cancel()
    await inner
    return 1.0


def is_cancelled_on_its_thread(task: AgentTask) -> float:
    return asyncio.run(cancels_its_task(task))


class Hostile:
    def __repr__(self) -> str:
        raise LookupError


class HostileMapping(dict[str, Any]):
    def __iter__(self) -> Any:
        raise Unusual


def returns_hostile(task: AgentTask) -> Any:
    return Hostile()


def returns_hostile_mapping(task: AgentTask) -> Any:
    return HostileMapping(reward=1.0)


def tells_the_key(task: AgentTask) -> Any:
    return {"reward": 1, "answer": task.api_key, "metrics": {task.api_key: 1}, "call_rewards": {task.api_key: 1}}


def returns_the_key(task: AgentTask) -> Any:
    return ["x" * (198 - len(task.api_key) // 2) + task.api_key]


def not_finite(task: AgentTask) -> float:
    return math.nan


def nonsense(task: AgentTask) -> Any:
    return [1.0]


def unknown_key(task: AgentTask) -> Any:
    return {"rewards": 1.0}


def text_reward(task: AgentTask) -> Any:
    return {"reward": "1.0"}


def infinite_metric(task: AgentTask) -> Any:
    return {"reward": 1.0, "metrics": {"turns": math.inf}}


def blocks(task: AgentTask) -> float:
    released.wait(30)
    return 1.0


async def hangs(task: AgentTask) -> float:
    await asyncio.sleep(60)
    return 1.0


async def hangs_and_refuses(task: AgentTask) -> float:
    for _ in range(40):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue
    return 1.0


def sleeps(task: AgentTask, seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def boxes_the_truth(answer: str, row: Mapping[str, Any]) -> bool:
    """A reward function for a grader."""
    return f"boxed{{{row['ground_truth']}}}" in answer
