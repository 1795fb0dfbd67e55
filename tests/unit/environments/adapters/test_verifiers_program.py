"""Environments of verifiers 0.4 as agent programs; tests of whole episodes need the package, the others do not."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.agents import verifiers_program
from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.agents.programs.interfaces import AgentError, AgentTask
from nemo_rl.agents.verifiers_program import VerifiersProgram
from nemo_rl.environments.interfaces import split_return
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
HAS_PACKAGE = find_spec("verifiers") is not None and find_spec("verifiers.v1") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="verifiers 0.4 is not installed")
without_package = pytest.mark.skipif(HAS_PACKAGE, reason="verifiers 0.4 is installed")
CLIENT = SimpleNamespace(name="the policy's")


def trace(**changes: Any) -> SimpleNamespace:
    agent = SimpleNamespace(name="agent", trainable=True, config=SimpleNamespace(client=CLIENT))
    rewards = {"is_right": SimpleNamespace(score=0.5), "bonus": SimpleNamespace(score=1.0)}
    given = {"agent": agent, "is_timeout": False, "stop_condition": "agent_completed", "errors": [], "num_turns": 2}
    scored = {"rewards": rewards, "reward": 1.5, "metrics": {"calls": 3.0, "unknown": None}, "last_reply": "42"}
    return SimpleNamespace(**{**given, **scored, **changes})


def other(trainable: bool, client: Any) -> SimpleNamespace:
    return trace(agent=SimpleNamespace(name="judge", trainable=trainable, config=SimpleNamespace(client=client)))


def result_of(*traces: SimpleNamespace, ok: bool = True, errors: tuple[Any, ...] = ()) -> dict[str, Any]:
    return verifiers_program._result_of(SimpleNamespace(ok=ok, errors=errors, traces=traces), CLIENT)


def test_an_episode_gives_reward_answer_and_metrics() -> None:
    metrics = {"turns": 2, "calls": 3.0, "is_right": 0.5, "bonus": 1.0}
    assert result_of(trace()) == {"reward": 1.5, "answer": "42", "metrics": metrics}
    assert result_of(trace(), other(False, SimpleNamespace()))["reward"] == 1.5
    assert result_of(trace(is_timeout=True, stop_condition="agent_timeout"))["reward"] == 1.5
    assert result_of(trace(rewards={}, reward=0))["reward"] is None  # for a grader, and else an error


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ([], "the episode has 0 trained agents: none"),
        ([trace(), other(True, CLIENT)], "the episode has 2 trained agents: agent, judge"),
        ([trace(), other(False, CLIENT)], "the agent judge is not trained, but calls the policy"),
        ([trace(rewards={"a": None})], "was not scored by a"),
        ([trace(is_timeout=True, stop_condition="scoring_timeout")], "was not scored to its end: scoring_timeout"),
    ],
)
def test_an_episode_without_one_whole_reward_is_an_error(traces: list[Any], reason: str) -> None:
    with pytest.raises(AgentError, match=reason):
        result_of(*traces)


def test_a_failed_episode_is_an_error_with_all_its_reasons() -> None:
    first = SimpleNamespace(type="EnvError", message="run() raised")
    second = SimpleNamespace(type="TaskError", message="the reward is broken")
    with pytest.raises(AgentError, match=r"EnvError: run\(\) raised; TaskError: the reward is broken"):
        result_of(trace(errors=[second]), ok=False, errors=(first,))
    with pytest.raises(AgentError, match="the package gives no reason"):
        result_of(trace(), ok=False)


def test_a_key_is_in_the_environment_variables_only_while_it_is_needed() -> None:
    with verifiers_program._key_variable("sk-1") as name:
        assert os.environ[name] == "sk-1" and "API_KEY" in name
    assert name not in os.environ and "sk-1" not in os.environ.values()


class Served:
    """An environment that plays an episode until it is told to end it."""

    def __init__(self, made: "Package") -> None:
        self.made = made
        self.is_serving = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self.made.failures:
            raise OSError(self.made.failures.pop())
        self.is_serving = True
        yield
        self.is_serving = False

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, slot: Any, context: Any) -> Any:
        await context.wait()
        assert self.is_serving
        return slot


class Package:
    """Stands for the package where only the number of its environments matters."""

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        self.made: list[Served] = []

    def load_environment(self, config: Any) -> Served:
        self.made.append(Served(self))
        return self.made[-1]


def environment_of(package: Package) -> Any:
    environment = object.__new__(verifiers_program._Environment)
    vars(environment).update(_package=package, _config=None, _tasks=["a", "b", "c"], _server=None, _servers=set())
    return environment


def test_a_server_is_replaced_and_stops_after_its_last_episode() -> None:
    package = Package([])

    async def play() -> None:
        environment, ends = environment_of(package), asyncio.Event()
        ends.set()
        late = asyncio.Event()
        kept = asyncio.create_task(environment.play(2, late))  # on the first server
        await asyncio.sleep(0)
        numbers = range(2 * verifiers_program._EPISODES)
        tasks = await asyncio.gather(*(environment.play(2 * number, ends) for number in numbers))
        assert tasks == [("a", "b", "c")[number % 3] for number in numbers]
        assert [one.is_serving for one in package.made] == [True, False, True]
        late.set()
        assert await kept == "b"
        assert [one.is_serving for one in package.made] == [False, False, True]
        await environment.shutdown()
        assert not package.made[2].is_serving

    asyncio.run(play())


def test_a_server_that_does_not_start_costs_its_episodes_and_no_others() -> None:
    package = Package(["the address is in use"])

    async def play() -> None:
        environment, ends = environment_of(package), asyncio.Event()
        ends.set()
        with pytest.raises(OSError, match="the address is in use"):
            await environment.play(0, ends)
        assert await environment.play(0, ends) == "a" and len(package.made) == 2
        await environment.shutdown()

    asyncio.run(play())


@without_package
def test_a_missing_package_is_named_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r'cluster\.venvs\.agent\.packages=\["verifiers==0\.4\.0"'):
        VerifiersProgram({"taskset": {"id": "verifiers_products"}})


async def is_echo(task: Any, trace: Any) -> float:
    """Return 1 if the last reply is the prompt, which `FakeEndpoint` answers with."""
    return float(trace.last_reply == task.prompt)


async def breaks(task: Any, trace: Any) -> float:
    raise RuntimeError("the reward is broken")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in ("examples", "tests/functional", "tests/unit/environments/agents"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield
    if "verifiers_products" in sys.modules:  # its connections belong to the event loop of a test
        sys.modules["verifiers_products"].connections.cache_clear()


def block(reward: str | None = None, **taskset: Any) -> dict[str, Any]:
    plugged = {} if reward is None else {"task": {"rewards": {reward: {"fn": f"{__name__}.{reward}"}}}}
    section = {"runtime": {"type": "subprocess"}, "max_turns": 3}
    return {"taskset": {"id": "verifiers_products", "num_tasks": 4, **plugged, **taskset}, "agent": section}


@needs_package
@pytest.mark.usefixtures("products")
def test_an_episode_of_the_package_calls_the_endpoint_with_the_key_of_its_sample() -> None:
    from fake_endpoint import FakeEndpoint

    kwargs = {"env": block("is_echo"), "validation_env": block("breaks", split="validation")}
    section = {"program": "nemo_rl.agents.verifiers_program.VerifiersProgram", "kwargs": kwargs}

    async def play(url: str) -> list[Any]:
        environment = AgentEnvironment(section)
        rows = [{"seed": 2 * number, "split": "train"} for number in range(6)] + [{"seed": 1, "split": "validation"}]
        given = {"base_url": url, "model": "policy", "messages": [], "tools": None, "seed": 7, "start_secret": "secret"}
        steps = [
            environment.step([[]], [{**row, "agent": {**given, "api_key": f"sk-{number}"}}], True)
            for number, row in enumerate([*rows, {"ground_truth": "4"}])
        ]
        outcomes = await asyncio.gather(*steps)
        await environment.shutdown()
        return [(split_return(one, 1, "AgentEnvironment")[0], one.answers) for one in outcomes]

    with FakeEndpoint() as endpoint:
        *played, (broken, _), (without_seed, _) = asyncio.run(play(endpoint.url))
        assert endpoint.calls == {f"sk-{number}": 1 for number in range(7)}
    assert [(one.reward, one.error) for one, _ in played] == [(1.0, None)] * 6
    answers = [answer for _, (answer,) in played]
    assert answers[:2] == answers[4:] and len(set(answers)) == 4  # six rows, four tasks
    metrics = played[0][0].metadata["played"]["metrics"]
    assert metrics == {"turns": 1.0, "calculator_calls": 0.0, "is_right": 0.0, "is_echo": 1.0}
    assert broken.reward is None and "TaskError" in broken.error and "the reward is broken" in broken.error
    assert "use data.train.dataset_name=episodes" in without_seed.error


@needs_package
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("env", "select", "reason"),
    [
        ({"taskset": {"id": "no_such_taskset"}}, None, "cannot be loaded: .*no_such_taskset"),
        (block(other=1), None, "(?s)cannot be loaded: .*other"),
        (block(), {"skip": 4}, "has no task"),
        (block(), {"limit": 0}, "(?s)cannot be loaded: .*limit"),
        ({**block(), "retries": {"max_retries": 1}}, None, r"kwargs\.env\.retries repeats episodes"),
        (
            {**block(), "agent": {"retries": {"rules": [{"type": "ProviderError", "max_retries": 2}]}}},
            None,
            r"kwargs\.env\.agent\.retries repeats episodes",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(env: dict[str, Any], select: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        VerifiersProgram(env, select)


@needs_package
@pytest.mark.usefixtures("products")
def test_an_endpoint_that_fails_is_an_error_of_the_sample() -> None:
    program = VerifiersProgram(block("is_echo"))
    task = AgentTask([], None, {"seed": 0, "split": "train"}, "http://127.0.0.1:1/v1", "sk-1", "policy", 7, 60.0)

    async def play() -> None:
        with pytest.raises(AgentError, match="the episode failed: ProviderError"):
            await program(task)
        await program.shutdown()

    asyncio.run(play())
