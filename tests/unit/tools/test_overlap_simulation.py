"""The simulation of overlap: seconds of small cases that are computed by hand, and ages that stay within the bound."""

import asyncio
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_rl.config import OverlapConfig

FOLDER = Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "simulation"
MODULES = ("overlap_simulation", "stand_ins", "virtual_time")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """`overlap_simulation.py` as a module; it finds its neighbours as a script does."""
    sys.path.insert(0, str(FOLDER))
    import overlap_simulation

    yield overlap_simulation
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        sys.modules.pop(name, None)


def workload(tool: ModuleType, **changes: Any) -> Any:
    """One engine, one prompt a step with one answer of 10 tokens after a prompt of one; 0.3 s of training a token.

    A decoding step takes 1 s with one running request and 1.5 s with two. A weight sync takes 1 s.
    """
    values: dict[str, Any] = {
        "turn_tokens": tool.LogNormal(10.0, 0.0),
        "num_engines": 1,
        "engine": tool.EngineSpeed(0.5, 0.5, math.inf, 8),
        "train_s_per_token": 0.3,
        "sync_s": 1.0,
        "num_prompts": 1,
        "num_generations": 1,
        "prompt_tokens": 1,
        "max_tokens": 100,
        "scale": 1,
    }
    return tool.Workload(**(values | changes))


def step_ends(tool: ModuleType, load: Any, num_steps: int, **overlap: Any) -> list[float]:
    ends: list[float] = tool.Simulation(load, OverlapConfig.build(**overlap), num_steps).run()
    return ends


@pytest.mark.fast
def test_none_samples_trains_and_syncs_in_turns(tool: ModuleType) -> None:
    # 10 s of decoding, 11 * 0.3 s of training, 1 s of sync
    assert step_ends(tool, workload(tool), 3, mode="none") == pytest.approx([13.3, 27.6, 41.9])


@pytest.mark.fast
def test_turns_wait_for_the_environment(tool: ModuleType) -> None:
    load = workload(tool, num_turns=2, wait_s=tool.LogNormal(5.0, 0.0))
    # two turns of 10 + 5 s; 1 + 10 + 1 + 10 tokens, of which one is the environment's observation
    assert step_ends(tool, load, 1, mode="none") == pytest.approx([30 + 22 * 0.3])


@pytest.mark.fast
def test_ahead_samples_the_next_group_during_training(tool: ModuleType) -> None:
    ends = step_ends(tool, workload(tool), 5, mode="ahead", max_age_steps=1)
    # Two groups run from 0 to 15 s; step 1 trains until 18.3 s. Step 2 begins after the sync at 19.3 s with the second
    # group, and starts the third, which has 10 tokens at 29.3 s. From then on a step takes these 10 s and the sync,
    # which waits for the group. The last step has nothing to start.
    assert ends == pytest.approx([18.3, 22.6, 33.6, 44.6, 55.6])


@pytest.mark.fast
@pytest.mark.parametrize("age", [1, 3])
def test_ahead_is_faster_where_environments_wait_and_keeps_the_bound(tool: ModuleType, age: int) -> None:
    waits = tool.LogNormal(30.0, 1.0)
    load = workload(tool, turn_tokens=tool.LogNormal(8.0, 1.0), num_turns=3, wait_s=waits, num_prompts=4)
    ahead = {"mode": "ahead", "max_age_steps": age, "order": "ready_first", "in_flight_weight_updates": True}
    none = step_ends(tool, load, 12, mode="none")
    assert step_ends(tool, load, 12, **ahead)[-1] < 0.8 * none[-1]  # `run` checks the ages


@pytest.mark.fast
def test_an_engine_shares_its_time_among_requests_and_stops_for_new_weights(tool: ModuleType) -> None:
    loop = tool.VirtualLoop()
    speed = tool.EngineSpeed(0.5, 0.5, 25.0, 8)
    engines = tool.SimulatedEngines(loop, 1, speed, tool.LogNormal(10.0, 0.0), 1)
    (engine,) = engines._engines
    ends: dict[int, float] = {}

    async def request(number: int, start: float) -> None:
        await asyncio.sleep(start)
        await engine.write(number, num_prompt_tokens=3, num_tokens=10)
        ends[number] = loop.now

    tasks = [loop.start(request(number, start), "a request") for number, start in ((1, 0.0), (2, 4.0))]
    loop.advance(7.0)
    engines.update_weights(2.0)
    with loop.used_by_waits():
        for task in tasks:
            task.result(1e9)
    # At 7 s the requests have 6 and 2 tokens, and prompts of 3. The sync ends at 9 s, reading 14 tokens at 9.56 s.
    # 4 tokens of both: until 15.56 s; then 4 more of the second alone.
    assert ends == pytest.approx({1: 15.56, 2: 19.56})
    loop.close()
