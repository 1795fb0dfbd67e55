"""A hostile sample costs at most itself, is named and counted, and leaves no process; docs/reference/faults.md has the
table. Also: environments in several actors.

Each case plays eight samples of one collection at the same time, one of them hostile, with the library's rollouts over
a real actor.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_environments import Hostile, Pooled

from nemo_rl.environments.workers.loading import WorkerKeys
from nemo_rl.environments.workers.start import Environment, EnvironmentPool, start_workers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Deed:
    """What a hostile sample does.

    Attributes:
        reason: part of its error; "" if it gets its reward.
        aborted: whether the environment hung or died.
        restarts: of the actor.
        stage: where it is done: "step", "open" or "close".
    """

    reason: str
    aborted: bool = False
    restarts: int = 0
    stage: str = "step"


DEEDS = {
    "raise": Deed("ValueError: I do not like this answer"),
    "exit": Deed("SystemExit: 3"),
    "interrupt": Deed("KeyboardInterrupt"),
    "nan": Deed("not finite"),
    "wrong shape": Deed("returned 2 rewards for 1 samples"),
    "no message": Deed("no dict with `role` and `content`"),
    "lock": Deed("its answer cannot be sent"),
    "print": Deed(""),
    "fork": Deed(""),
    "kill": Deed("died 3 times over this sample", aborted=True, restarts=3),
    "hang": Deed("gave no answer in 3 s", aborted=True, restarts=2),
    "fork and hang": Deed("gave no answer in 3 s", aborted=True, restarts=2),
    "leak": Deed("max_memory_gb=1 allows no more", aborted=True, restarts=3),
    "raise at open": Deed("ValueError: I do not like this answer", stage="open"),
    "kill at open": Deed("died 3 times over this sample", aborted=True, restarts=3, stage="open"),
    "hang at close": Deed("", restarts=1, stage="close"),
    "kill at close": Deed("", restarts=3, stage="close"),
}
"""Deed of the hostile sample -> what happens to it. All others get their reward."""

QUICK = ("raise", "lock", "no message", "fork and hang", "leak")
"""The cases that CI runs."""


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


async def play(environment: Environment, deed: str, stage: str) -> Any:
    """Play the episode of one sample with the deed at a stage, as `experience.samples` does."""
    deed = deed.removesuffix(f" at {stage}")
    start = await environment.open_episode({stage: deed} if stage != "step" else {})
    try:
        if start.error is not None:
            return start
        return await environment.step(say(deed if stage == "step" else ""), start.metadata)
    finally:
        await environment.close_episode(start.metadata)


def play_all(environment: Environment, deeds: list[tuple[str, str]]) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(asyncio.create_task(play(environment, *deed)) for deed in deeds))

    return asyncio.run(main())


def outcomes_of(name: str, folder: Path) -> tuple[list[Any], Environment]:
    deed = DEEDS[name]
    keys = WorkerKeys(step_timeout_s=3.0, max_memory_gb=1.0 if name in ("leak", "drip") else None)
    environment = start_workers("hostile", Hostile, {"folder": str(folder)}, keys)
    try:
        good = ("", "step")
        found = play_all(environment, [good, good, good, (name, deed.stage), good, good, good, good])
        again = play_all(environment, [good] * 4)  # the environment still works
    finally:
        environment.shutdown()
    assert [each.reward for each in again] == [1.0] * 4
    return found, environment


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in DEEDS])
def test_a_hostile_sample_costs_itself_only(name: str, tmp_path: Path) -> None:
    deed = DEEDS[name]
    before = daemons()
    found, environment = outcomes_of(name, tmp_path)
    hostile = found.pop(3)
    assert [each.reward for each in found] == [1.0] * 7
    if deed.reason:
        assert deed.reason in hostile.error and hostile.aborted == deed.aborted
    else:
        assert hostile.reward == 1.0 and hostile.error is None
    assert environment.num_restarts <= deed.restarts
    assert (environment.num_restarts > 0) == (deed.restarts > 0)
    assert left_since(before) == []


def left_since(before: set[int], within_s: float = 10.0) -> list[int]:
    """The daemons that still run; the sleep of another program on the machine does not last that long."""
    end = time.monotonic() + within_s
    while (left := daemons() - before) and time.monotonic() < end:
        time.sleep(0.1)
    return sorted(left)


def daemons() -> set[int]:
    found = set()
    for each in psutil.process_iter(["cmdline"]):
        if each.info["cmdline"] == ["sleep", "3600"]:
            found.add(each.pid)
    return found


@pytest.mark.usefixtures("local_ray")
@pytest.mark.long
def test_a_slow_leak_restarts_the_actor_and_costs_no_sample(tmp_path: Path) -> None:
    keys = WorkerKeys(step_timeout_s=30.0, max_memory_gb=0.6)
    environment = start_workers("hostile", Hostile, {"folder": str(tmp_path)}, keys)
    try:
        found = [play_all(environment, [("drip", "step")] * 2) for _ in range(15)]
    finally:
        environment.shutdown()
    assert [each.reward for pair in found for each in pair] == [1.0] * 30
    assert environment.num_restarts >= 1


@pytest.mark.usefixtures("local_ray")
def test_an_episode_stays_in_its_actor_and_a_slow_one_delays_only_that() -> None:
    environment = start_workers("pooled", Pooled, {}, WorkerKeys(num_workers=2))
    assert isinstance(environment, EnvironmentPool)

    async def episode(number: int) -> tuple[list[Any], float]:
        start = await environment.open_episode({"number": number})
        steps, began = [], time.perf_counter()
        for turn in range(3):
            wait = {"wait_s": 4.0} if number == 0 and turn == 1 else {"wait_s": 0.0}
            steps.append(await environment.step(say("go"), {**start.metadata, **wait}))
        seconds = time.perf_counter() - began
        await environment.close_episode(start.metadata)
        return steps, seconds

    async def main() -> list[tuple[list[Any], float]]:
        return await asyncio.gather(*(asyncio.create_task(episode(number)) for number in range(6)))

    try:
        asyncio.run(environment.open_episode({"number": 100}))  # the first actor has started
        found = asyncio.run(main())
    finally:
        environment.shutdown()
    for steps, _ in found:
        assert [step.reward for step in steps] == [1.0, 2.0, 3.0]  # the state of the episode was there
        assert {step.metadata["stepped_by"] for step in steps} == {steps[0].metadata["pid"]}
    slow, others = found[0][0][0].metadata["pid"], found[1:]
    assert len({steps[0].metadata["pid"] for steps, _ in found}) == 2
    assert max(seconds for steps, seconds in others if steps[0].metadata["pid"] != slow) < 3.0
    assert found[0][1] >= 4.0


@pytest.mark.usefixtures("local_ray")
def test_open_episodes_are_bounded() -> None:
    environment = start_workers("pooled", Pooled, {}, WorkerKeys(max_open_episodes=2))

    async def episode(number: int) -> int:
        start = await environment.open_episode({"number": number})
        await asyncio.sleep(0.02)
        await environment.close_episode(start.metadata)
        return int(start.metadata["open"])

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.create_task(episode(number)) for number in range(8)))

    try:
        assert max(asyncio.run(main())) == 2
    finally:
        environment.shutdown()
