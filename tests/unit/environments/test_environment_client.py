"""The client over real Ray actors: batching, deadlines, deaths, several turns, nothing left."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import ray
import torch
from environments_for_tests import Decorated, GuessTheNumber, Slow
from processes_for_tests import children, is_alive, wait_until_gone

from nemo_rl.environments.client import EnvironmentClient
from nemo_rl.environments.utils import create_env
from nemo_rl.utils.errors import WorkerDiedError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def make():
    clients = []

    def start(env_class, **options):
        client = EnvironmentClient("game", env_class, options.pop("cfg", {}), **options)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.shutdown()


def say(text):
    return [
        {"role": "user", "content": "guess", "token_ids": torch.arange(3)},
        {"role": "assistant", "content": text, "token_ids": torch.arange(2)},
    ]


def step_all(client, guesses, secret=5):
    async def main():
        steps = [client.step(say(guess), {"secret": secret, "turns": 0}) for guess in guesses]
        return await asyncio.gather(*steps)

    return asyncio.run(main())


def pid_of(client):
    return ray.get(client._incarnation.ready)


def test_calls_of_one_tick_travel_together(make):
    client = make(GuessTheNumber)
    results = step_all(client, ["5", "4", "raise", "9"])
    assert client.num_calls == 1
    assert [result.reward for result in results] == [1.0, 0.0, None, 0.0]
    assert "I do not understand" in results[2].error
    results = step_all(client, ["5"] * 50)  # another event loop
    assert client.num_calls == 2
    assert all(result.metadata["batch"] == 50 for result in results)


def test_several_turns(make):
    client = make(Decorated)

    async def play(secret):
        log, metadata, low, high = [], {"secret": secret, "turns": 0}, 0, 64
        while True:
            guess = (low + high) // 2
            log.append({"role": "assistant", "content": str(guess)})
            result = await client.step(log, metadata)
            log.append(result.observation)
            metadata = result.metadata
            if result.terminated:
                return guess, result, log
            low, high = (guess + 1, high) if result.observation["content"] == "higher" else (low, guess)

    async def main():
        return await asyncio.gather(*[play(secret) for secret in range(0, 64, 7)])

    games = asyncio.run(main())
    assert [guess for guess, _, _ in games] == list(range(0, 64, 7))
    for _, result, log in games:
        assert result.reward == 1.0 and result.metadata["turns"] == len(log) // 2
    assert client.num_calls <= 7  # as many as the longest game has turns: 6 or 7


def test_a_coroutine_environment_steps_several_batches_at_once(make):
    client = make(Slow)

    async def main():
        await client.step(say(""), {})
        started = time.monotonic()
        waiting = []
        for _ in range(4):
            waiting.append(asyncio.ensure_future(client.step(say(""), {})))
            await asyncio.sleep(0.02)
        results = await asyncio.gather(*waiting)
        return results, time.monotonic() - started

    results, seconds = asyncio.run(main())
    assert client.num_calls == 5 and seconds < 1.2
    assert results[0].reward == {"taste": 1.0, "form": 0.5}


def test_an_actor_killed_mid_step_is_replaced_and_its_samples_are_issued_again(make, caplog):
    client = make(GuessTheNumber)
    step_all(client, ["5"])
    first = pid_of(client)

    async def main():
        batches = [asyncio.gather(client.step(say("sleep 0.5"), {"secret": 0, "turns": 0}))]
        await asyncio.sleep(0.05)
        batches.append(asyncio.gather(client.step(say("5"), {"secret": 5, "turns": 0})))
        await asyncio.sleep(0.15)
        os.kill(first, signal.SIGKILL)
        return [(await batch)[0] for batch in batches]

    with caplog.at_level(logging.WARNING):
        results = asyncio.run(main())
    assert [result.reward for result in results] == [1.0, 1.0]
    assert client.num_restarts == 1 and pid_of(client) != first
    assert "environment 'game' is gone" in caplog.text and f"pid: {first}" in caplog.text


def test_samples_that_kill_every_actor_are_found_and_the_others_are_graded_again_and_again(make):
    client = make(GuessTheNumber, max_restarts=3)
    for num_restarts in (3, 6):
        results = step_all(client, ["5", "die", "4"])
        assert [result.reward for result in results] == [1.0, None, 0.0]
        assert "died 3 times over this sample" in results[1].error
        assert client.num_restarts == num_restarts


def test_too_many_deaths_stop_the_run_with_the_name(make):
    client = make(GuessTheNumber, max_restarts=1)
    with pytest.raises(WorkerDiedError, match="'game' died once more after 1 restarts without an answer"):
        step_all(client, ["die"])
    with pytest.raises(WorkerDiedError, match="'game' died"):
        step_all(client, ["5"])


def test_a_hung_step_is_an_error_and_the_environment_goes_on(make):
    client = make(GuessTheNumber, step_timeout_s=1.0)
    step_all(client, ["5"])
    first = pid_of(client)
    results = step_all(client, ["hang", "5"])
    assert [result.reward for result in results] == [None, 1.0]
    assert "no answer in 1 s" in results[0].error
    assert not is_alive(first)


def test_the_deadline_is_that_of_a_sample_not_of_its_batch_or_of_those_before_it(make):
    client = make(GuessTheNumber, step_timeout_s=1.0)
    step_all(client, ["5"])
    results = step_all(client, ["sleep 0.4"] * 4, secret=0)
    assert [result.reward for result in results] == [1.0] * 4
    assert client.num_restarts == 1

    async def in_four_ticks():
        steps = []
        for _ in range(4):
            steps.append(asyncio.ensure_future(client.step(say("sleep 0.5"), {"secret": 0, "turns": 0})))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*steps)

    assert [result.reward for result in asyncio.run(in_four_ticks())] == [1.0] * 4
    assert client.num_restarts == 1


def test_a_constructor_that_raises_is_reported_at_once(make):
    client = make(GuessTheNumber, cfg={"broken": True})
    with pytest.raises(WorkerDiedError, match="(?s)could not be constructed.*no such game"):
        step_all(client, ["5"])
    assert client.num_restarts == 0


def test_metrics_come_from_the_actor_and_survive_its_death(make):
    client = make(GuessTheNumber)
    batch = {"rewards": torch.tensor([1.0, 0.0, 0.0, 1.0])}
    _, metrics = asyncio.run(client.global_post_process_and_metrics(batch))
    assert metrics["mean_reward"] == 0.5
    os.kill(int(metrics["pid"]), signal.SIGKILL)
    _, metrics = asyncio.run(client.global_post_process_and_metrics(batch))
    assert metrics["mean_reward"] == 0.5 and client.num_restarts == 1


def math_client():
    client = create_env("math", {"num_workers": 2, "timeout_s": 5.0})

    async def main():
        steps = [
            client.step(say("$\\boxed{\\frac{1}{2}}$"), {"ground_truth": "0.5"}),
            client.step(say("\\boxed{3}"), {"ground_truth": "4"}),
        ]
        return await asyncio.gather(*steps)

    results = asyncio.run(main())
    assert [result.reward for result in results] == [1.0, 0.0]
    assert results[0].answer == "\\frac{1}{2}"
    actor = pid_of(client)
    return client, actor, children(actor)


def test_shutdown_leaves_no_process():
    client, actor, graders = math_client()
    assert len(graders) >= 1
    client.shutdown()
    client.shutdown()
    assert wait_until_gone([actor, *graders]) == []
    with pytest.raises(WorkerDiedError, match="was shut down"):
        step_all(client, ["5"])


def test_a_killed_actor_leaves_no_grading_process():
    client, actor, graders = math_client()
    os.kill(actor, signal.SIGKILL)
    assert wait_until_gone(graders, timeout_s=3.0) == []
    client.shutdown()


DRIVER = """
import asyncio, ray, sys
sys.path.insert(0, {here!r})
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
import test_environment_client as tests
client, actor, graders = tests.math_client()
print(actor, *graders, flush=True)
asyncio.run(asyncio.sleep(600))
"""


def test_a_killed_driver_leaves_no_process():
    here = os.path.dirname(__file__)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(here=here)],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) >= 2 and all(map(is_alive, pids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert wait_until_gone(pids, timeout_s=20.0) == []
