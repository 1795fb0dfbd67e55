"""Reward functions: one answer or lists, with coroutines, weights and names; errors name the reward."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.config.schema.env import calls_functions, keeps_rows, stop_strings_of
from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.registry import ENV_REGISTRY, check_environment, env_class_path
from nemo_rl.environments.reward_functions import NamedReward, RewardEnvironment
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

ROWS = [{"answer": "4", "prompt": "2+2="}, {"answer": "7", "prompt": "3+4="}]


def right(answer: str, row: Mapping[str, Any]) -> float:
    return float(row["answer"] in answer)


def only_answer(answer: str) -> int:
    return len(answer)


async def later(answer: str, row: Mapping[str, Any]) -> bool:
    await asyncio.sleep(0)
    return row["answer"] == answer


def of_lists(answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([len(answer) / len(answers) for answer in answers])


async def lists_later(answers: Sequence[str]) -> torch.Tensor:
    await asyncio.sleep(0)
    return torch.ones(len(answers)) / 2


def graded(environment: RewardEnvironment, answers: Sequence[str], rows: Sequence[Any] = ROWS) -> EnvironmentReturn:
    logs = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in answers]
    metadata = [{"ground_truth": "", "row": row} for row in rows]
    return asyncio.run(environment.step(logs, metadata))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (right, [1, 0]),
        (only_answer, [1, 1]),
        (later, [1, 0]),
        (of_lists, [0.5, 0.5]),
        (lists_later, [0.5, 0.5]),
        (lambda answer, row: int(row["prompt"] == "2+2="), [1, 0]),
        (lambda answer, row: np.float32(2.5), [2.5, 2.5]),
    ],
)
def test_forms_of_functions(function: Any, expected: list[float]) -> None:
    found = graded(RewardEnvironment.of_functions({"r": function}, {}), ["4", "8"])
    assert isinstance(found.rewards, torch.Tensor)
    assert found.rewards.tolist() == expected
    assert found.errors == [None, None]
    assert found.terminateds.tolist() == [True, True]


def test_several_rewards_are_components_times_their_weights() -> None:
    environment = RewardEnvironment.of_functions({"right": right, "length": only_answer}, {"length": -0.25})
    found = graded(environment, ["4", "88"])
    assert isinstance(found.rewards, dict)
    assert {name: column.tolist() for name, column in found.rewards.items()} == {
        "right": [1, 0],
        "length": [-0.25, -0.5],
    }


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda answer, row: row["nosuch"], "KeyError: 'nosuch' (test_reward_functions.py"),
        (lambda answer, row: None, "TypeError: the reward 'r' returned None, not a number"),
        (lambda answer, row: "1", "TypeError: the reward 'r' returned '1', not a number"),
        (lambda answer, row: 1 / 0, "ZeroDivisionError"),
        (lambda answers: [1, 2], "ValueError: the reward 'r' returned 2 numbers for 1 answers"),
        (lambda answers: 1.0, "TypeError: the reward 'r' returned 1.0 for lists, not a list of numbers"),
        (lambda answer, row: math.nan, "ValueError: the reward 'r' returned nan, which is not a finite number"),
        (lambda answer: torch.tensor(-math.inf), "ValueError: the reward 'r' returned tensor(-inf), which is not"),
        (lambda answers: [math.inf], "ValueError: the reward 'r' returned inf, which is not a finite number"),
    ],
)
def test_an_error_names_the_reward_and_is_no_zero(function: Any, reason: str) -> None:
    found = graded(RewardEnvironment.of_functions({"r": function}, {}), ["4"], ROWS[:1])
    assert found.errors is not None
    assert str(found.errors[0]).startswith(reason)
    assert str(found.errors[0]).endswith(", in the reward 'r'")


def test_one_failing_sample_leaves_the_others_their_reward() -> None:
    environment = RewardEnvironment.of_functions({"r": lambda answer, row: 1.0 / len(answer)}, {})
    found = graded(environment, ["4", ""])
    assert found.errors is not None
    assert found.errors[0] is None
    assert "ZeroDivisionError" in str(found.errors[1])


def test_a_number_that_is_not_finite_fails_only_its_sample_of_a_list() -> None:
    calls: list[int] = []

    def of_all(answers: Sequence[str]) -> list[float]:
        calls.append(len(answers))
        return [math.nan if answer == "" else 1.0 for answer in answers]

    found = graded(RewardEnvironment.of_functions({"r": of_all, "size": only_answer}, {}), ["4", ""])
    assert calls == [2]
    assert found.errors is not None and found.errors[0] is None
    assert "the reward 'r' returned nan, which is not a finite number" in str(found.errors[1])


def test_a_function_of_lists_that_fails_is_tried_for_each_sample_alone() -> None:
    environment = RewardEnvironment.of_functions({"r": lambda answers: [1 / len(each) for each in answers]}, {})
    with pytest.raises(ZeroDivisionError):
        graded(environment, ["4", ""])


def test_the_known_answer_is_in_the_row() -> None:
    seen: list[Any] = []
    environment = RewardEnvironment.of_functions({"r": lambda answer, row: seen.append(row) or 0.0}, {})
    metadata = [{"ground_truth": "4", "row": {"question": "2+2="}}, {"ground_truth": "7", "episode_seed": 1}]
    logs = [[{"role": "assistant", "content": "x"}]] * 2
    asyncio.run(environment.step(logs, metadata))
    assert seen[0] == {"ground_truth": "4", "question": "2+2="}
    assert seen[1]["ground_truth"] == "7"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "is 3, which is no function"),
        (lambda: 1.0, "has the parameters ()"),
        (lambda completions, ground_truth, names: 1.0, "has the parameters (completions, ground_truth, names)"),
    ],
)
def test_what_is_no_reward_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="the reward 'r' ") as caught:
        NamedReward("r", function)
    assert message in str(caught.value)
    assert "A reward is a function of (answer, row)" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"env.reward.function is missing"),
        ({"function": "nosuch_file.my_reward"}, r"env.reward.function='nosuch_file.my_reward' cannot be imported"),
        ({"function": "my_reward"}, r"env.reward.function='my_reward' cannot be imported"),
        ({"function": {"a": "math.nosuch"}}, r"env.reward.function.a='math.nosuch' cannot be imported"),
        ({"function": "math.pi"}, r"the reward 'pi' is 3.14.*, which is no function"),
        ({"function": "math.fabs", "weights": {"fab": 1.0}}, r"env.reward.weights has fab.*Rewards: fabs"),
    ],
)
def test_a_wrong_section_is_refused_before_anything_starts(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_environment("reward", section)


def test_a_section_with_functions_may_have_any_name() -> None:
    section = {"function": {"size": "builtins.len"}, "weights": {"size": 2.0}, "num_workers": 2, "stop_strings": ["."]}
    check_environment("my_rewards", section)
    assert env_class_path("my_rewards", section) == env_class_path("reward")
    assert calls_functions("my_rewards", section) and keeps_rows({"my_rewards": section}, "my_rewards")
    assert stop_strings_of({"my_rewards": section}, "my_rewards") == ["."]


def test_functions_that_grade_for_tools_get_the_rows() -> None:
    graders = {"functions": {"function": "builtins.len"}, "math": {}}
    environments = {
        name: ToolEnvironmentConfig.build(grader={"name": "reward" if kwargs else name, "kwargs": kwargs})
        for name, kwargs in graders.items()
    }
    assert keeps_rows(environments, "functions")
    assert not keeps_rows(environments, "math")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"function": "nosuch.f"}, r"env.my_rewards.function='nosuch.f' cannot be imported"),
        (
            {"function": "builtins.len", "weights": {"size": 1.0}},
            r"env.my_rewards.weights has size, which is no reward",
        ),
        ({"function": "builtins.len", "weightz": {}}, r"env.my_rewards.weightz is no argument .* 'weights'"),
    ],
)
def test_errors_of_another_name_name_their_place(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_environment("my_rewards", section)


def test_a_registered_or_dotted_name_is_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENV_REGISTRY, "mine", {"actor_class_fqn": "my_file.Mine"})
    assert env_class_path("mine", {"function": "builtins.len"}) == "my_file.Mine"
    assert env_class_path("my_file.Mine", {"function": "builtins.len"}) == "my_file.Mine"


def test_a_section_names_functions() -> None:
    environment = RewardEnvironment({"function": {"size": "builtins.len", "up": "math.ceil"}, "weights": {"size": 2.0}})
    found = graded(environment, ["40"], ROWS[:1])
    assert isinstance(found.rewards, dict)
    assert found.rewards["size"].tolist() == [4.0]
    assert found.errors is not None and "in the reward 'up'" in str(found.errors[0])
    assert math.isfinite(found.rewards["up"][0])
