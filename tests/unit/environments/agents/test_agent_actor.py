"""The environment `agent` in its actors: places of programs, deadlines, and traits that the driver reads."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_steps import KEY, agent
from fake_endpoint import FakeEndpoint

from nemo_rl.environments.interfaces import StepResult
from nemo_rl.environments.registry import create_env
from nemo_rl.environments.workers.start import Environment


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def finished(environment: Environment, url: str, num_samples: int) -> list[StepResult]:
    """Play samples at the same time, as rollouts do."""

    async def play() -> list[StepResult]:
        async def episode(number: int) -> StepResult:
            row = {"ground_truth": "4", "number": number}
            start = await environment.open_episode(row)
            try:
                return await environment.step([], {**start.metadata, "agent": agent(url)})
            finally:
                await environment.close_episode(row)

        return await asyncio.gather(*(episode(number) for number in range(num_samples)))

    return asyncio.run(play())


def started(section: dict[str, Any]) -> Environment:
    environment = create_env("agent", section)
    assert environment.agent_section is not None and environment.reads_chat and not environment.continues_episodes
    return environment


def test_programs_are_divided_among_actors(local_ray: Path, endpoint: FakeEndpoint) -> None:
    section = {"program": "programs_for_tests.compares", "num_workers": 2, "max_open_episodes": 4}
    environment = started(section)
    try:
        results = finished(environment, endpoint.url, 12)
    finally:
        environment.shutdown()
    assert [result.reward for result in results] == [1.0] * 12
    assert [result.metadata["number"] for result in results] == list(range(12))
    assert endpoint.calls == {KEY: 12}


def test_waiting_for_a_place_does_not_count(local_ray: Path) -> None:
    keys = {"timeout_s": 4.0, "step_timeout_s": 5.0, "max_open_episodes": 2}
    environment = started({"program": "programs_for_tests.sleeps", "kwargs": {"seconds": 1.5}, **keys})
    began = time.monotonic()
    try:
        results = finished(environment, "", 8)
    finally:
        environment.shutdown()
    assert [result.error for result in results] == [None] * 8
    assert time.monotonic() - began > 6  # longer than the deadline of a step
