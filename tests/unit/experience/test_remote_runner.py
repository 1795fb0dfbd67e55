"""Runner actors on two Ray nodes: the same groups however many there are, whatever dies or is stopped.

The nodes need a process that has not started Ray: run this file alone (`pytest -n 0 -m long` with its path).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray_nodes import ray_nodes
from rollout_parts import prompts
from runner_parts import SILENCE_S, Workers, make_runner

from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.runners.client import RemoteRunner, ranks_of_runner
from nemo_rl.experience.runners.stored import whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(280)]

PROMPTS = prompts(*"abcdefgh")
NUM_GENERATIONS = 3
StartRunner = Callable[..., tuple[RemoteRunner, Workers]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Ray's ids of two nodes."""
    if ray.is_initialized():
        pytest.skip("this process has started Ray already; run this file alone")
    with ray_nodes(8, 8) as cluster:
        path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())])}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": path})
        yield sorted(node["NodeID"] for node in ray.nodes())
        ray.shutdown()


@pytest.fixture
def start(nodes: list[str]) -> Iterator[StartRunner]:
    loop = EventLoopThread()
    started: list[RemoteRunner] = []

    def start_runner(num_runners: int, num_engines: int = 2, delay_s: float = 0.0) -> tuple[RemoteRunner, Workers]:
        workers = Workers([nodes[engine * len(nodes) // num_engines] for engine in range(num_engines)], delay_s)
        started.append(make_runner(workers, num_runners, loop))
        return started[-1], workers

    yield start_runner
    for runner in started:
        runner.shutdown(timeout_s=5)
    loop.close()


def collect(runner: RemoteRunner) -> list[Trajectory]:
    key = RolloutKey(5, "train", 1)
    return runner.collect(PROMPTS, NUM_GENERATIONS, SamplingParams(max_new_tokens=8), key).trajectories


def played(samples: list[Trajectory]) -> list[tuple[Any, ...]]:
    """What was sampled, by group and sample, with tokens from the object store."""
    return [
        (
            sample.group_index,
            sample.sample_index,
            sample.reward,
            sample.turn_rewards,
            [(message["role"], message["content"], message["token_ids"].tolist()) for message in sample.message_log],
            [message["generation_logprobs"].tolist() for message in sample.message_log[1::2]],
        )
        for sample in whole(samples)
    ]


@pytest.fixture(scope="module")
def expected(nodes: list[str]) -> list[tuple[Any, ...]]:
    """The samples of one undisturbed runner."""
    loop = EventLoopThread()
    runner = make_runner(Workers(nodes[:1], 0.0), 1, loop)
    found = played(collect(runner))
    runner.shutdown(timeout_s=5)
    loop.close()
    assert [sample[:2] for sample in found] == [(group, index) for group in range(8) for index in range(3)]
    assert len({sample[4][1][1] for sample in found}) > 5, "samples differ"
    assert {len(sample[3]) for sample in found} == {2}, "two turns"
    return found


def processes_of(runner: RemoteRunner) -> list[Any]:
    """The processes of the actors."""
    found = []
    for each in runner._runners:
        incarnation = each.actor.running()
        found.append(ray.get(incarnation.ready, timeout=60))
    return found


def test_two_runners_play_on_the_nodes_of_their_engines(
    start: StartRunner, nodes: list[str], expected: list[tuple[Any, ...]]
) -> None:
    runner, _ = start(2)
    assert played(collect(runner)) == expected
    assert [process.node_id for process in processes_of(runner)] == nodes
    with pytest.raises(ConfigError, match="use at most 2 runners"):
        start(3)


def test_four_runners_play_what_one_plays(
    start: StartRunner, nodes: list[str], expected: list[tuple[Any, ...]]
) -> None:
    runner, _ = start(4, num_engines=5)
    assert played(collect(runner)) == expected
    assert {process.node_id for process in processes_of(runner)} == set(nodes)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "actor died"), (signal.SIGSTOP, f"no sign of life for {SILENCE_S:g} s")]
)
def test_groups_of_a_lost_runner_are_played_again(
    start: StartRunner,
    expected: list[tuple[Any, ...]],
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
    reason: str,
) -> None:
    runner, _ = start(2, delay_s=1.5)
    victim = processes_of(runner)[1].pid
    tasks = [
        runner.start_group(PROMPTS, row, NUM_GENERATIONS, SamplingParams(max_new_tokens=8), RolloutKey(5, "train", 1))
        for row in range(PROMPTS.size)
    ]
    time.sleep(0.5)
    os.kill(victim, number)
    groups = [task.result(120.0) for task in tasks]
    assert played([sample for group in groups for sample in group.trajectories]) == expected
    assert "The actor of rollout runner '1' ended" in caplog.text and reason in caplog.text
    assert not psutil.pid_exists(victim) or psutil.Process(victim).status() == psutil.STATUS_ZOMBIE


def test_a_lost_engine_is_replaced_once(start: StartRunner, expected: list[tuple[Any, ...]]) -> None:
    runner, workers = start(1, delay_s=0.5)
    processes_of(runner)
    ray.kill(workers.workers[0])
    assert played(collect(runner)) == expected
    assert workers.num_restarts == 1


def test_a_group_of_a_checkpoint_goes_back_to_the_object_store(start: StartRunner) -> None:
    runner, _ = start(1)
    samples = collect(runner)[:NUM_GENERATIONS]
    states = [sample.state_dict() for sample in whole(samples)]
    again = runner.keep(Rollouts([Trajectory.from_state(state) for state in states])).trajectories
    assert all(sample.stored is not None and sample.stored.rows is not None for sample in again)
    assert not hasattr(again[0].message_log[0]["token_ids"], "tolist"), "the driver keeps numbers of tokens"
    assert played(again) == played(samples)
    assert [sample.length for sample in again] == [sample.length for sample in samples]


def test_engines_are_divided_into_consecutive_whole_ones() -> None:
    assert [ranks_of_runner(number, 2, 4, 1) for number in range(2)] == [[0, 1], [2, 3]]
    assert [ranks_of_runner(number, 2, 6, 2) for number in range(2)] == [[0, 1], [2, 3, 4, 5]]
    assert [ranks_of_runner(number, 3, 5, 1) for number in range(3)] == [[0], [1, 2], [3, 4]]
