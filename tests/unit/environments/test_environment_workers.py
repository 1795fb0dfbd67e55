"""Places of episodes in several actors, and the bounds and keys of an environment; without Ray."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
from processes_for_tests import is_alive, wait_until_gone

from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.environments.workers.loading import own_keys, worker_keys
from nemo_rl.environments.workers.process_guard import MEMORY_MARK, _BoundedText
from nemo_rl.environments.workers.start import EnvironmentPool
from nemo_rl.host.processes import descendants, end_descendants
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast


class Client:
    """One actor, which is told how long a step takes, and notes what it was asked."""

    name = "game"
    num_restarts = 1
    num_calls = 3

    def __init__(self, number: int, wait_s: float = 0.0):
        self.number, self.wait_s = number, wait_s
        self.open: set[int] = set()
        self.most = 0

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        self.open.add(metadata)
        self.most = max(self.most, len(self.open))
        return EpisodeStart(metadata)

    async def step(self, message_log: Any, metadata: Any) -> StepResult:
        await asyncio.sleep(self.wait_s)
        return StepResult({"role": "environment", "content": ""}, metadata, float(self.number), terminated=False)

    async def close_episode(self, metadata: Any) -> None:
        self.open.discard(metadata)


async def episode(
    pool: EnvironmentPool, number: int, turns: int = 3, *, opens: bool = True
) -> tuple[set[float], float]:
    """Play an episode that is closed by another task, as rollouts do; return who stepped it, and the seconds."""
    began, seen = time.perf_counter(), set()
    if opens:
        await pool.open_episode(number)
    for _ in range(turns):
        seen.add((await pool.step([], number)).reward)
    seconds = time.perf_counter() - began
    await asyncio.create_task(pool.close_episode(number))
    return seen, seconds


def play(pool: EnvironmentPool, count: int, **options: Any) -> list[tuple[set[float], float]]:
    async def main() -> list[tuple[set[float], float]]:
        return await asyncio.gather(*(asyncio.create_task(episode(pool, n, **options)) for n in range(count)))

    return asyncio.run(main())


def pool_of(*clients: Client, **options: Any) -> EnvironmentPool:
    return EnvironmentPool(clients, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("opens", [True, False])
def test_an_episode_stays_where_it_began(opens: bool) -> None:
    clients = Client(0, 0.01), Client(1, 0.01)
    found = play(pool_of(*clients), 8, opens=opens)
    assert all(len(seen) == 1 for seen, _ in found)
    assert sorted(next(iter(seen)) for seen, _ in found) == [0.0] * 4 + [1.0] * 4  # divided evenly


def test_a_slow_actor_delays_its_own_episodes_only() -> None:
    found = play(pool_of(Client(0, 0.3), Client(1, 0.0)), 4)
    for seen, seconds in found:
        assert (seconds >= 0.9) == (seen == {0.0})


def test_the_number_of_open_episodes_is_bounded_and_all_are_played() -> None:
    client = Client(0, 0.001)
    pool = pool_of(client, max_open_episodes=3)
    assert len(play(pool, 10)) == 10
    assert client.most == 3 and not client.open
    assert len(play(pool, 5)) == 5  # on another event loop


def test_an_episode_that_was_cancelled_while_it_waited_takes_no_place() -> None:
    client = Client(0)
    pool = pool_of(client, max_open_episodes=1)

    async def main() -> None:
        await pool.open_episode(1)
        waiting = asyncio.create_task(episode(pool, 2))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pool.close_episode(1)
        await asyncio.wait_for(episode(pool, 3), 5)

    asyncio.run(main())
    assert client.most == 1 and not client.open


def test_counts_are_sums_over_the_actors() -> None:
    pool = pool_of(Client(0), Client(1))
    assert (pool.num_restarts, pool.num_calls) == (2, 6)


def test_only_the_first_part_of_an_output_is_kept() -> None:
    kept = io.StringIO()
    stream = _BoundedText(kept, 10)
    for _ in range(1000):
        assert stream.write("abcd") == 4
    assert kept.getvalue().startswith("abcdabcdab\n[the environment wrote more")
    assert len(kept.getvalue()) < 100


GREEDY = """
import subprocess, sys, time
from nemo_rl.environments.workers.process_guard import guard_process
guard_process(0.2)
child = subprocess.Popen(["sh", "-c", "setsid sleep 3600 & echo $!"], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
held = []
while True:
    held.append(bytearray(1 << 23))
    time.sleep(0.01)
"""


def test_a_process_that_uses_too_much_memory_says_so_and_ends_with_what_it_started() -> None:
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert MEMORY_MARK in done.stderr and "max_memory_gb=0.2" in done.stderr
    assert wait_until_gone([int(done.stdout)]) == []


def test_all_processes_below_one_are_ended() -> None:
    tree = subprocess.Popen(["sh", "-c", "sh -c 'sleep 3600 & sleep 3600' & wait"])
    try:
        end = time.monotonic() + 10
        while len(descendants(tree.pid)) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        below = descendants(tree.pid)
        assert len(below) >= 3
        os.kill(tree.pid, signal.SIGSTOP)
        end_descendants(tree.pid)
        assert wait_until_gone(below) == [] and is_alive(tree.pid)
    finally:
        tree.kill()
        tree.wait()


@dataclass
class OwnKeys:
    size: int = 3
    max_memory_gb: float = 1.0


def test_keys_of_the_library_are_no_unknown_keys_of_the_environment() -> None:
    section = {"size": 4, "max_memory_gb": 2.0, "step_timeout_s": 5.0}
    assert own_keys(section, OwnKeys) == {"size": 4, "max_memory_gb": 2.0}
    assert own_keys(section, None) == {"size": 4}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"num_workers": 0}, "env.game.num_workers=0 must be an integer above 0"),
        ({"num_workers": 1.5}, "must be an integer"),
        ({"step_timeout_s": "soon"}, "env.game.step_timeout_s='soon' must be a number above 0"),
        ({"max_memory_gb": -1}, "env.game.max_memory_gb=-1 must be a number above 0"),
    ],
)
def test_wrong_keys_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        worker_keys("game", section, 600.0)
