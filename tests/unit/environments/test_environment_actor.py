"""The hosting actor's boundary, without Ray around it."""

import asyncio

import pytest
import torch
from environments_for_tests import Decorated, GuessTheNumber, Slow, Wrong

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt
from nemo_rl.environments.registry import check_environment
from nemo_rl.environments.utils import ENV_REGISTRY, create_env, env_class_path, register_env
from nemo_rl.environments.workers import actor as environment_actor
from nemo_rl.environments.workers.actor import EnvironmentActor, EnvironmentActorAsync
from nemo_rl.environments.workers.loading import load_env_class, plain_env_class
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def unguarded(monkeypatch):
    """Leave the test process as it is.

    The guard makes its process the parent of orphans. Nothing here reaps them, so a dead raylet of a later test would
    stay a zombie, which Ray's workers take for alive.
    """
    monkeypatch.setattr(environment_actor, "guard_process", lambda max_memory_gb: None)


def say(text):
    return [{"role": "user", "content": "guess"}, {"role": "assistant", "content": text}]


def fresh(n, secret=5):
    return [{"secret": secret, "turns": 0} for _ in range(n)]


def test_a_good_batch_is_one_call():
    results = EnvironmentActor(GuessTheNumber, {}).step([say("5"), say("7"), say("1")], fresh(3))
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]
    assert [result.observation["content"] for result in results] == ["right", "lower", "higher"]
    assert [result.terminated for result in results] == [True, False, False]
    assert [result.answer for result in results] == ["5", "7", "1"]
    assert results[0].next_stop_strings == ["\n"]
    assert results[0].metadata == {"secret": 5, "turns": 1, "calls": 1, "batch": 3}


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (({"rewards": [[1.0], [1.0, 2.0]]}, {}), ValueError),
        (({"rewards": [1.0, 2.0]}, None), TypeError),
        (({}, {}), KeyError),
    ],
)
def test_wrong_corrections_raise_in_the_actor(monkeypatch, returned, error):
    batch = BatchedDataDict(rewards=torch.ones(2))
    monkeypatch.setattr(GuessTheNumber, "global_post_process_and_metrics", lambda self, batch: returned)
    with pytest.raises(error):
        EnvironmentActor(GuessTheNumber, {}).global_post_process_and_metrics(batch)
    good = ({"rewards": [0.5, 1.0]}, {"metric": 1})
    monkeypatch.setattr(GuessTheNumber, "global_post_process_and_metrics", lambda self, batch: good)
    corrected, metrics = EnvironmentActor(GuessTheNumber, {}).global_post_process_and_metrics(batch)
    assert (corrected["rewards"].tolist(), metrics) == ([0.5, 1.0], {"metric": 1})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("raise", "ValueError: I do not understand (environ"),
        ("exit", "SystemExit: 3"),
        ("cancel", "CancelledError: "),
    ],
)
def test_one_bad_sample_of_a_batch_is_found_and_the_others_are_graded(bad, text):
    logs = [say("5"), say(bad), say("1")]
    results = EnvironmentActor(GuessTheNumber, {}).step(logs, fresh(3))
    assert [result.reward for result in results] == [1.0, None, 0.0]
    assert results[1].error.startswith(text) and results[1].terminated
    assert results[0].error is None
    assert [result.metadata["turns"] for result in results] == [1, 0, 1]  # no turn counts twice


def test_a_cancelled_step_of_a_coroutine_stays_cancelled():
    class Waits(Slow):
        async def step(self, message_log_batch, metadata):
            await asyncio.sleep(0 if metadata[0] else 10)
            raise asyncio.CancelledError

    async def cancel():
        actor = EnvironmentActorAsync(Waits, {}, step_timeout_s=5)
        (result,) = await actor.step([say("")], [{"own": 1}])
        assert result.error.startswith("CancelledError")
        step = asyncio.ensure_future(actor.step([say("")], [{}]))
        await asyncio.sleep(0.1)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(cancel())


def test_a_reward_that_is_not_finite_is_an_error():
    results = EnvironmentActor(GuessTheNumber, {}).step([say("13"), say("5")], fresh(2))
    assert results[0].reward is None and "not finite" in results[0].error
    assert results[1].reward == 1.0


def test_a_step_may_return_components_or_errors_or_be_a_coroutine():
    actor = EnvironmentActorAsync(Slow, {})
    results = asyncio.run(actor.step([say("")] * 2, [{}, {"problem": "no judge"}]))
    assert results[0].reward == {"taste": 1.0, "form": 0.5} and results[0].error is None
    assert results[1].reward is None and results[1].error == "no judge"


def test_a_return_of_the_wrong_size_names_the_field():
    actor = EnvironmentActor(Wrong, {})
    with pytest.raises(ValueError, match="1 observations for 2 samples"):
        asyncio.run(actor._calls.step_batch([say("")] * 2, [{}, {}]))
    assert [result.error for result in actor.step([say("")] * 2, [{}, {}])] == [None, None]


def test_five_field_returns_still_work():
    outcome = EnvironmentReturn([], [], [], torch.zeros(0), torch.zeros(0))
    assert outcome.answers is None and outcome.errors is None
    assert EnvironmentReturn._fields[:6] == (
        "observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers"
    )  # fmt: skip


def test_a_ray_decorated_class_is_unwrapped_with_its_resources():
    plain, options = load_env_class("environments_for_tests.Decorated")
    assert plain.__name__ == "Decorated" and issubclass(plain, GuessTheNumber)
    assert options["num_cpus"] == 0.5 and "max_restarts" not in options
    assert plain_env_class(Decorated)[0] is plain
    assert plain_env_class(GuessTheNumber) == (GuessTheNumber, {})


@pytest.mark.parametrize("path", ["torch.nn.Linear", "environments_for_tests.Nothing", "no_such.X"])
def test_values_other_than_environment_classes_are_refused(path):
    with pytest.raises(ConfigError, match=path.rpartition(".")[2].replace("X", "no_such")):
        load_env_class(path)


def test_names_resolve_to_classes():
    for name in ("math", "math_default", "math_multi_reward"):
        load_env_class(env_class_path(name))
    assert env_class_path("my.own.Environment") == "my.own.Environment"
    with pytest.raises(ConfigError, match="Did you mean 'math'.*math_default"):
        env_class_path("mth")


def test_wrong_names_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="unknown environment"):
        create_env("gmae", {})
    with pytest.raises(ConfigError, match=r"env\.sums\.function='my_file\.my_reward' cannot be imported"):
        check_environment("sums", {"function": "my_file.my_reward"})


def test_an_environment_name_is_registered_once(monkeypatch):
    monkeypatch.setattr("nemo_rl.environments.registry.ENV_REGISTRY", dict(ENV_REGISTRY))
    register_env("game", "environments_for_tests.GuessTheNumber")
    register_env("game", "environments_for_tests.GuessTheNumber")
    assert env_class_path("game") == "environments_for_tests.GuessTheNumber"
    with pytest.raises(ConfigError, match="already leads to"):
        register_env("game", "environments_for_tests.Slow")


def test_pass_rate_counts_prompts_not_samples():
    prompts = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 3], [4, 4], [1, 2]])
    correct = torch.tensor([0, 0, 1, 1, 0, 1])
    assert calculate_pass_rate_per_prompt(prompts, correct) == pytest.approx(2 / 3)
    texts = ["a", "a", "b", "b", "c", "a"]
    assert calculate_pass_rate_per_prompt(texts, correct.bool()) == pytest.approx(2 / 3)
    assert calculate_pass_rate_per_prompt(prompts[:0], correct[:0]) == 0.0
