"""The client over real Ray actors: batching, deadlines, dead actors, several turns, and cleanup."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from environments_for_tests import Decorated, GuessAlone, GuessTheNumber, Sandboxes, Slow, Tools
from processes_for_tests import children, is_alive, wait_until_gone
from transformers import AutoTokenizer

from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import math_hf_data_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart
from nemo_rl.environments.utils import create_env
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.utils.errors import WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).resolve().parents[3]
ADDING = ROOT / "docs/development/adding-things.md"
TOKENIZERS = ROOT / "tests/assets/tokenizers"


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
    return ray.get(client._actor.incarnation.ready).pid


def test_calls_of_one_tick_are_sent_together(make):
    client = make(GuessTheNumber)
    results = step_all(client, ["5", "4", "raise", "9"])
    assert client.num_calls == 1
    assert [result.reward for result in results] == [1.0, 0.0, None, 0.0]
    assert "I do not understand" in results[2].error
    results = step_all(client, ["5"] * 50)  # another event loop
    assert client.num_calls == 2
    assert all(result.metadata["batch"] == 50 for result in results)


def test_an_episode_has_several_turns(make):
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
        waiting = []
        for _ in range(4):
            waiting.append(asyncio.ensure_future(client.step(say(""), {"wait_for": 5})))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*waiting)

    results = asyncio.run(main())
    assert client.num_calls == 5
    assert results[0].error is None, "none of them ends before the last has started"
    assert results[0].reward == {"taste": 1.0, "form": 0.5}


def play_tools(client, states):
    """Open and step episodes at the same time; return the results, and the seconds after which each came."""

    async def play(state):
        start = await client.open_episode(state)
        result = await client.step(say(""), start.metadata)
        return result, time.perf_counter() - started

    async def main():
        return await asyncio.gather(*[play(state) for state in states])

    asyncio.run(client.open_episode({}))  # the actor has started
    started = time.perf_counter()
    return zip(*asyncio.run(main()), strict=True)


@pytest.mark.parametrize("env_class", [GuessAlone, Tools])
def test_a_slow_sample_delays_no_other_where_each_is_stepped_alone(make, env_class):
    client = make(env_class)
    if env_class is Tools:
        results, seconds = play_tools(client, [{"wait_s": 6.0}, *[{"wait_s": 0.5, "open_s": 0.05}] * 199])
        assert max(result.metadata["most"] for result in results) > 100
    else:

        async def timed(guess):
            await client.step(say(guess), {"secret": 0, "turns": 0})
            return time.perf_counter() - started

        async def main():
            return await asyncio.gather(*[timed(guess) for guess in ["sleep 6.0", *["0"] * 199]])

        step_all(client, ["5"])
        started = time.perf_counter()
        seconds = asyncio.run(main())
    assert client.num_calls >= 200
    assert seconds[0] >= 6.0 and max(seconds[1:]) < 5.0


def test_a_slow_coroutine_is_cancelled_and_its_neighbours_continue(make):
    client = make(Tools, step_timeout_s=1.5)
    states = [{"wait_s": 60.0}, {"raises": "no such tool"}, *[{"wait_s": 0.8}] * 8]
    results, seconds = play_tools(client, states)
    assert [result.reward for result in results] == [None, None, *[1.0] * 8]
    assert "Tools gave no answer in 1.5 s" in results[0].error and "no such tool" in results[1].error
    assert client.num_restarts == 0 and max(seconds) < 5


@pytest.mark.long
def test_a_coroutine_that_blocks_has_its_actor_killed_and_alone_gets_an_error(make, monkeypatch):
    monkeypatch.setattr("nemo_rl.environments.workers.client._LATER_S", 0.5)
    client = make(Tools, step_timeout_s=1.0)
    results, _ = play_tools(client, [{"block_s": 60.0}, *[{"wait_s": 0.3}] * 4])
    assert [result.reward for result in results] == [None, *[1.0] * 4]
    assert "no answer in 1 s" in results[0].error and client.num_restarts == 2


def test_many_samples_that_are_stepped_alone_survive_a_stopped_actor(make):
    client = make(Tools, step_timeout_s=1.5)
    asyncio.run(client.open_episode({}))
    os.kill(pid_of(client), signal.SIGSTOP)
    client._deadline_s = 2.0  # sooner than the grace for blocking coroutines

    async def main():
        return await asyncio.gather(*[client.step(say(""), {"wait_s": 0.2}) for _ in range(20)])

    assert [result.reward for result in asyncio.run(main())] == [1.0] * 20
    assert client.num_restarts == 1


def test_one_sample_of_many_that_are_stepped_alone_is_blamed_for_deaths(make):
    client = make(GuessAlone, max_restarts=3)
    results = step_all(client, ["sleep 0.3"] * 6 + ["die"] + ["sleep 0.3"] * 5, secret=0)
    assert [result.reward for result in results] == [1.0] * 6 + [None] + [1.0] * 5
    assert "died 3 times over this sample" in results[6].error
    assert client.num_restarts == 3


def test_an_actor_killed_mid_step_is_replaced_and_its_samples_are_resubmitted(make, caplog):
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
    assert "The actor of environment 'game' ended" in caplog.text and f"pid: {first}" in caplog.text


def test_samples_that_kill_every_actor_are_isolated_and_the_others_graded(make):
    client = make(GuessTheNumber, max_restarts=3)
    for num_restarts in (3, 6):
        results = step_all(client, ["5", "die", "4"])
        assert [result.reward for result in results] == [1.0, None, 0.0]
        assert "died 3 times over this sample" in results[1].error
        assert client.num_restarts == num_restarts


def test_too_many_deaths_stop_the_run_and_name_the_environment(make):
    client = make(GuessTheNumber, max_restarts=1)
    with pytest.raises(WorkerDiedError, match="'game' died once more after 1 restarts without an answer"):
        step_all(client, ["die"])
    with pytest.raises(WorkerDiedError, match="'game' died"):
        step_all(client, ["5"])


def test_a_hung_step_is_an_error_and_the_environment_continues(make):
    client = make(GuessTheNumber, step_timeout_s=1.0)
    step_all(client, ["5"])
    first = pid_of(client)
    results = step_all(client, ["hang", "5"])
    assert [result.reward for result in results] == [None, 1.0]
    assert "no answer in 1 s" in results[0].error
    assert not is_alive(first)


def test_an_actor_that_was_stopped_is_replaced_and_its_only_sample_is_graded(make):
    client = make(GuessTheNumber, step_timeout_s=1.0)
    step_all(client, ["5"])
    first = pid_of(client)
    os.kill(first, signal.SIGSTOP)
    assert [result.reward for result in step_all(client, ["5"])] == [1.0]
    assert client.num_restarts == 1
    assert wait_until_gone([first]) == []


def test_the_deadline_applies_to_a_sample_not_to_its_batch_or_the_queue(make):
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


def test_metrics_come_from_the_actor_and_outlive_it(make):
    client = make(GuessTheNumber)
    batch = {"rewards": torch.tensor([1.0, 0.0, 0.0, 1.0])}
    _, metrics = asyncio.run(client.global_post_process_and_metrics(batch))
    assert metrics["mean_reward"] == 0.5
    os.kill(int(metrics["pid"]), signal.SIGKILL)
    _, metrics = asyncio.run(client.global_post_process_and_metrics(batch))
    assert metrics["mean_reward"] == 0.5 and client.num_restarts == 1


def test_episodes_are_opened_and_closed_in_the_actor(make, tmp_path, caplog):
    client = make(Sandboxes, step_timeout_s=1.5)

    async def main(commands):
        metadata = [{"at": str(tmp_path), "number": n, "command": c} for n, c in enumerate(commands)]
        starts = await asyncio.gather(*[client.open_episode(item) for item in metadata])
        opened = sorted(os.listdir(tmp_path))
        good = [start for start in starts if start.error is None]
        results = await asyncio.gather(*[client.step(say(""), start.metadata) for start in good])
        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*[client.close_episode(start.metadata) for start in starts])
        return starts, opened, results

    starts, opened, results = asyncio.run(main(["", "raise", "wrong", "hang", ""]))
    assert opened == ["0", "4"] and os.listdir(tmp_path) == []
    assert starts[0].observation == {"role": "user", "content": "ready"}
    assert [start.error and start.error.split(" (")[0] for start in starts] == [
        None,
        "OSError: no sandbox is free",
        "TypeError: open_episode returned dict, not an EpisodeStart",
        "environment 'game' gave no answer in 1.5 s",
        None,
    ]
    assert [result.reward for result in results] == [1.0, 1.0]
    assert caplog.text.count("could not close an episode: KeyError: 'path'") == 3


def test_failing_metrics_give_a_warning_and_keep_the_rewards(make, caplog):
    client = make(Sandboxes)

    def ask(rewards):
        return asyncio.run(client.global_post_process_and_metrics(BatchedDataDict(rewards=rewards)))

    given = torch.ones(2)
    batch, metrics = ask(given)
    assert (batch["rewards"].tolist(), given.tolist(), metrics) == ([0.5, 0.5], [1.0, 1.0], {"count": 2})
    with caplog.at_level(logging.WARNING):
        batch, metrics = ask(torch.ones(3))
    assert (batch["rewards"].tolist(), metrics) == ([1.0] * 3, {})
    assert "Environment 'game' gives no metrics" in caplog.text and "ValueError: too many for me" in caplog.text


def test_hooks_that_a_class_lacks_are_not_called(make):
    client = make(Slow)

    async def main():
        start = await client.open_episode({"a": 1})
        await client.close_episode({"a": 1})
        return start, await client.global_post_process_and_metrics({"rewards": 1})

    assert asyncio.run(main()) == (EpisodeStart({"a": 1}), ({"rewards": 1}, {}))
    assert client.num_calls == 0


class ScriptedEngine(GenerationInterface):
    """Answers each request with what `script` makes of it."""

    def __init__(self, script):
        self.script = script
        self.weight_version = 1

    async def generate(self, request):
        ids = self.script(request)
        return GenerationResult(ids, [-0.5] * len(ids), "stop", [VersionSpan(0, self.weight_version)])

    def shutdown(self):
        pass


def test_the_documented_two_turn_environment_runs(make, tmp_path, monkeypatch):
    """The code of the page runs as a user's module in its actor, with real rollouts over a scripted engine."""
    blocks = re.findall(r"^```python\n(.*?)^```", ADDING.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (shown,) = (block for block in blocks if "class SecondTry" in block)
    (tmp_path / "second_try.py").write_text(shown)
    monkeypatch.syspath_prepend(str(tmp_path))
    client = make("second_try.SecondTry", cfg={"second_reward": 0.25})
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / "minimind")
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in (("2+2=", "4"), ("3+3=", "6"), ("5+5=", "99"))
    ]
    prompts = rl_collate_fn(
        [
            math_hf_data_processor({**row, "task_name": "game"}, TaskDataSpec(), tokenizer, None, idx)
            for idx, row in enumerate(rows)
        ]
    )

    def answer(request):
        seen = tokenizer.decode(request.prompt_token_ids)
        said = "It is 6" if "Think again" in seen else "It is 4"
        return tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"]

    loop = EventLoopThread()
    try:
        runner = RolloutRunner(ScriptedEngine(answer), {"game": client}, tokenizer, RolloutLimits(512, 2, 60.0), loop)
        rollouts = runner.collect(prompts, 1, SamplingParams(max_new_tokens=32), RolloutKey(0, "train", 1))
    finally:
        loop.close()
    assert [(t.reward, t.num_turns) for t in rollouts.trajectories] == [(1.0, 1), (0.25, 2), (0.0, 2)]
    assert rollouts.metrics == {"game/share_of_second_tries": pytest.approx(2 / 3)}
    second = rollouts.trajectories[1].message_log
    assert "".join(tokenizer.decode(m["token_ids"]) for m in second) == (
        "<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nIt is 4<|im_end|>\n"
        "<|im_start|>user\nThat is wrong. Think again.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nIt is 6<|im_end|>"
    )


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
    assert wait_until_gone(graders) == []
    client.shutdown()


DRIVER = """
import asyncio, ray, sys
sys.path[:] = {path!r}
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
import test_environment_client as tests
client, actor, graders = tests.math_client()
print(actor, *graders, flush=True)
asyncio.run(asyncio.sleep(600))
"""


def test_a_killed_driver_leaves_no_process():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(path=sys.path)],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) >= 2 and all(map(is_alive, pids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert wait_until_gone(pids) == []
