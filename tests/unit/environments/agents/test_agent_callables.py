"""Functions as agent programs: rewards, graders, metrics, and every way to fail."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import programs_for_tests
import pytest
import torch
from agent_steps import KEY, agent, played
from fake_endpoint import FakeEndpoint

from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.config.schema.agents import AgentEnvironmentConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.registry import check_environment
from nemo_rl.environments.workers.loading import load_env_class, traits_of
from nemo_rl.utils.errors import ConfigError

GRADER = {"name": "math", "kwargs": {"num_workers": 1}}


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def program(name: str, **keys: Any) -> dict[str, Any]:
    return {"program": f"programs_for_tests.{name}", **keys}


@pytest.mark.parametrize("name", ["compares", "compares_async"])
def test_a_function_calls_the_model_and_returns_the_reward(name: str, endpoint: FakeEndpoint) -> None:
    right, wrong = played(endpoint.url, program(name), [{"ground_truth": "4"}, {"ground_truth": "5"}])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert endpoint.calls == {KEY: 2}
    assert right.metadata["ground_truth"] == "4"


def test_arguments_reach_functions_and_classes(endpoint: FakeEndpoint) -> None:
    (result,) = played(endpoint.url, program("compares_async", kwargs={"factor": 0.5}))
    assert result.reward == 0.5
    rows = [{}, {}, {}]
    results = played(endpoint.url, program("Counting", kwargs={"start": 2}), rows)
    assert sorted(result.reward for result in results) == [3.0, 4.0, 5.0]  # one object for all


@pytest.mark.parametrize(("name", "closed"), [("Closing", [1]), ("of_a_class", [])])
def test_an_object_is_shut_down_at_the_end(name: str, closed: list[int], endpoint: FakeEndpoint) -> None:
    programs_for_tests.Closing.closed.clear()
    (result,) = played(endpoint.url, program(name))
    assert result.reward == 1.0 and programs_for_tests.Closing.closed == closed


def test_answer_metrics_and_rewards_of_calls_are_passed_on(endpoint: FakeEndpoint) -> None:
    environment = AgentEnvironment(program("details"))
    rows = [{"agent": agent(endpoint.url, seed=seed), "id": seed} for seed in (1, 4)]

    async def play() -> Any:
        returned = [await environment.step([[]], [row], True) for row in rows]
        batch = BatchedDataDict(
            rewards=torch.ones(2), extra_env_info=[one.metadata[0] for one in returned], text=["", ""]
        )
        _, metrics = await environment.global_post_process_and_metrics(batch)
        return returned, metrics

    (first, _), metrics = asyncio.run(play())
    assert first.answers == ["text"] and first.rewards.tolist() == [1.0]
    assert first.metadata[0]["call_rewards"] == {"call-1": 0.25, "call-2": 1.0}
    assert metrics["turns"] == 2.0 and metrics["tools"] == 2.5 and metrics["mean_program_s"] > 0


def test_samples_that_were_not_played_here_are_left_out(endpoint: FakeEndpoint) -> None:
    environment = AgentEnvironment(program("answers_text", grader=GRADER))

    async def play() -> list[dict[str, Any]]:
        returned = await environment.step([[]], [{"ground_truth": "4", "agent": agent(endpoint.url)}])
        found = []
        for infos in ([None, returned.metadata[0], {}], [None]):
            batch = BatchedDataDict(rewards=torch.ones(len(infos)), extra_env_info=infos)
            corrected, metrics = await environment.global_post_process_and_metrics(batch)
            assert corrected["rewards"].tolist() == [1.0] * len(infos)
            found.append(metrics)
        await environment.shutdown()
        return found

    some, none = asyncio.run(play())
    assert some["mean_program_s"] > 0 and "accuracy" not in some and none == {}


@pytest.mark.parametrize("name", ["answers", "answers_text"])
def test_a_grader_grades_the_answer(name: str, endpoint: FakeEndpoint) -> None:
    rows = [{"ground_truth": "4"}, {"ground_truth": "5"}]
    assert [one.reward for one in played(endpoint.url, program(name, grader=GRADER), rows)] == [1.0, 0.0]


def test_reward_functions_with_a_name_of_their_own_grade_the_answer(endpoint: FakeEndpoint) -> None:
    functions = {
        "function": {"right": "programs_for_tests.boxes_the_truth", "size": "builtins.len"},
        "weights": {"size": 0.5},
    }
    section = program("answers_text", grader={"name": "my_rewards", "kwargs": functions})
    check_environment("agent", section)
    results = played(endpoint.url, section, [{"ground_truth": "4"}, {"ground_truth": "5"}])
    size = 0.5 * len(programs_for_tests.answers_text(None))
    assert [result.reward for result in results] == [{"right": 1.0, "size": size}, {"right": 0.0, "size": size}]


def test_the_grader_adds_its_metrics(endpoint: FakeEndpoint) -> None:
    environment = AgentEnvironment(program("answers_text", grader=GRADER))

    async def play() -> dict[str, Any]:
        returned = await environment.step([[]], [{"ground_truth": "4", "agent": agent(endpoint.url)}])
        batch = BatchedDataDict(
            rewards=torch.ones(1),
            total_reward=torch.ones(1),
            is_end=torch.ones(1),
            extra_env_info=returned.metadata,
            text=["4"],
            generation_lengths=torch.ones(1),
            prompt_lengths=torch.ones(1),
        )
        _, metrics = await environment.global_post_process_and_metrics(batch)
        await environment.shutdown()
        return metrics

    metrics = asyncio.run(play())
    assert metrics["accuracy"] == 1.0 and "mean_program_s" in metrics


@pytest.mark.parametrize(("fields", "seen"), [(None, "ground_truth,id"), (["id"], "id"), (["other"], ""), ([], "")])
def test_a_program_sees_the_named_fields_of_its_row(fields: Any, seen: str, endpoint: FakeEndpoint) -> None:
    (result,) = played(endpoint.url, program("shows_row", row_fields=fields), [{"ground_truth": "4", "id": 1}])
    assert result.answer == seen


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "LookupError: no luck with *** (programs_for_tests.py:"),
        ("exits", "SystemExit: 3"),
        ("exits_async", "SystemExit: 3"),
        ("interrupts", "KeyboardInterrupt"),
        ("raises_unusual", "Unusual: (its text raises LookupError)"),
        ("raises_unusual_async", "Unusual: (its text raises LookupError)"),
        ("raises_group", "BaseExceptionGroup: several"),
        ("returns_hostile", "a Hostile whose text raises LookupError, which is no number"),
        ("returns_hostile_mapping", "cannot be read: Unusual"),
        ("skips", "Skipped: not now"),
        ("cancels_its_task", "CancelledError"),
        ("is_cancelled_on_its_thread", "CancelledError"),
        ("not_finite", "reward=nan, which is not finite"),
        ("nonsense", "reward=[1.0], which is no number"),
        ("unknown_key", "the keys ['rewards'], but only reward, answer, metrics, call_rewards"),
        ("text_reward", "reward='1.0', which is no number"),
        ("infinite_metric", "metrics.turns=inf, which is not finite"),
        ("nothing", "returned no reward"),
        ("answers_text", "returned no reward"),
    ],
)
def test_a_failure_is_the_error_of_its_sample(name: str, reason: str, endpoint: FakeEndpoint) -> None:
    (result,) = played(endpoint.url, program(name))
    assert reason in result.error


def test_an_answer_is_needed_for_a_grader(endpoint: FakeEndpoint) -> None:
    (result,) = played(endpoint.url, program("not_finite"))
    assert result.reward is None
    (result,) = played(endpoint.url, program("Counting", kwargs={"start": 0}, grader=GRADER))
    assert result.error == "the program returned no answer for env.agent.grader"


@pytest.mark.parametrize("name", ["blocks", "hangs", "hangs_and_refuses"])
def test_a_late_program_costs_only_its_sample(name: str, endpoint: FakeEndpoint) -> None:
    programs_for_tests.released.clear()
    started = time.monotonic()

    async def play() -> list[Any]:
        slow = AgentEnvironment(program(name, timeout_s=0.3))
        quick = AgentEnvironment(program("compares"))
        steps = [one.step([[]], [{"ground_truth": "4", "agent": agent(endpoint.url)}]) for one in (slow, quick)]
        outcomes = await asyncio.gather(*steps)
        assert time.monotonic() - started < 3
        programs_for_tests.released.set()
        return outcomes

    late, good = asyncio.run(play())
    assert late.errors == ["the program gave no result in 0.3 s (env.agent.timeout_s) and was ended"]
    assert good.errors == [None] and good.rewards.tolist() == [1.0]


def test_hanging_threads_keep_no_place(endpoint: FakeEndpoint) -> None:
    programs_for_tests.released.clear()
    started = time.monotonic()
    results = played(endpoint.url, program("blocks", timeout_s=0.5), [{}] * 100)
    programs_for_tests.released.set()
    assert all(result.error is not None for result in results) and time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "exactly one of program, command and service; there is none"),
        ({"program": "a.b", "service": "http://localhost"}, "there is program, service"),
        ({"service": "http://localhost", "kwargs": {"a": 1}}, "kwargs belongs to program"),
        ({"service": "http://localhost", "environment": {"a": "1"}}, "environment belongs to command"),
        ({"service": "http://localhost", "readable": ["/opt"]}, "readable belongs to command"),
        ({"program": "a.b", "timeout_s": 600}, "timeout_s=600 must be less than step_timeout_s=600"),
        ({"program": "programs_for_tests.missing"}, "cannot be imported"),
        ({"program": "programs_for_tests"}, "cannot be imported"),
        ({"program": "programs_for_tests.NotCallable"}, "cannot be called"),
        ({"program": "programs_for_tests.released"}, "cannot be called"),
        ({"program": "programs_for_tests.compares", "kwargs": {"factor": 1}}, "unexpected keyword argument 'factor'"),
        ({"program": "programs_for_tests.Counting", "kwargs": {"begin": 1}}, "env.agent.kwargs.begin is no argument"),
        ({"command": ["no-such-program-here"]}, "no program on this machine"),
    ],
)
def test_wrong_sections_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
        AgentEnvironment(keys)


def test_the_driver_knows_that_it_runs_agents() -> None:
    env_class, _ = load_env_class("nemo_rl.agents.programs.environment.AgentEnvironment")
    traits = traits_of(env_class, {})
    assert traits.runs_agents and traits.steps_samples_alone and traits.is_async and traits.pooled
    assert not traits.continues_episodes and traits.reads_chat
    others, _ = load_env_class("nemo_rl.environments.math_environment.MathEnvironment")
    assert not traits_of(others, {}).runs_agents
    assert AgentEnvironmentConfig.build(program="a.b").max_open_episodes == 64
