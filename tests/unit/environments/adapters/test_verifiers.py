"""The adapter of the package verifiers, with the real package and small environments (`verifiers_for_tests`)."""

import asyncio
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nemo_rl.data.interfaces import Chat
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.utils import create_env
from nemo_rl.environments.workers.loading import load_env_class
from nemo_rl.utils.errors import ConfigError

TOKENIZER = Path(__file__).resolve().parents[4] / "tests/assets/tokenizers/qwen3"
needs_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")


def make(kind: str) -> Any:
    env_class, _ = load_env_class(env_class_path("verifiers"))
    return env_class({"id": "verifiers_for_tests", "kwargs": {"kind": kind}})


def played(env: Any, *answers: str, seed: int = 2, split: str = "train") -> list[Any]:
    """Play one episode; return its start and the result of each turn."""

    async def play() -> list[Any]:
        async with asyncio.timeout(60):
            start = await env.open_episode({"seed": seed, "split": split, "episode_seed": 0})
            results, state = [start], start.metadata
            for answer in answers:
                results.append(await env.step([[{"role": "assistant", "content": answer}]], [state]))
                (state,) = results[-1].metadata
            await env.close_episode(state)
            assert env._episodes == {}
            return results

    return asyncio.run(play())


@needs_verifiers
def test_a_question_of_one_turn_is_scored_by_the_rubric() -> None:
    env = make("single")
    start, right = played(env, "4", seed=2)  # row 1: 2+2=
    assert start.observation["messages"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    assert (right.rewards.tolist(), right.terminateds.tolist(), right.errors) == ([1.0], [True], [None])
    assert right.metadata[0]["scores"] == {"is_right": 1.0, "length": 1.0, "num_turns": 1.0}
    _, wrong = played(env, "5", seed=2)
    assert (wrong.rewards.tolist(), wrong.errors) == ([0.0], [None])
    assert played(env, "0", split="validation")[0].observation["messages"][1]["content"] == "held out"
    batch: BatchedDataDict[Any] = BatchedDataDict(extra_env_info=[right.metadata[0], wrong.metadata[0], {"seed": 1}])
    assert env.global_post_process_and_metrics(batch)[1] == {"is_right": 0.5, "length": 1.0, "num_turns": 1.0}


@needs_verifiers
def test_an_episode_of_several_turns_continues_with_what_the_environment_says() -> None:
    start, first, second, last = played(make("guess"), "1", "2", "6", seed=4)  # row 2: 3+3=
    assert start.observation == {"role": "user", "content": "3+3="}
    assert first.observations[0]["messages"] == [
        {"role": "user", "content": "wrong: 1"},
        {"role": "user", "content": "Guess again."},
    ]
    assert not first.terminateds.any() and not second.terminateds.any() and first.rewards.tolist() == [0.0]
    assert (last.rewards.tolist(), last.terminateds.tolist()) == ([1.0], [True])
    assert last.observations[0] == {"role": "user", "content": "right"}
    *_, out_of_turns = played(make("guess"), "1", "1", "1", "1", seed=4)
    assert (out_of_turns.rewards.tolist(), out_of_turns.terminateds.tolist()) == ([0.0], [True])


@needs_verifiers
def test_episodes_run_at_the_same_time_and_one_that_is_left_is_cleaned_up() -> None:
    env = make("guess")
    env._environment.left.clear()

    async def play() -> list[float]:
        opened = [{"seed": 2 * n, "split": "train", "episode_seed": 0} for n in range(4)]
        starts = await asyncio.gather(*(env.open_episode(each) for each in opened))
        states = [start.metadata for start in starts]
        answers = ([{"role": "assistant", "content": str(2 * n + 2)}] for n in range(3))
        results = await asyncio.gather(
            *(env.step([log], [state]) for log, state in zip(answers, states[:3], strict=True))
        )
        await env.close_episode(states[3])
        lost = await env.step([[{"role": "assistant", "content": "8"}]], [states[3]])
        assert "process of the environment `verifiers` died" in lost.errors[0]
        await env.shutdown()
        return [result.rewards.item() for result in results]

    assert asyncio.run(play()) == [1.0] * 3
    assert sorted(env._environment.left) == ["2", "4", "6", "8"]


@needs_verifiers
@pytest.mark.parametrize(
    ("kind", "answer", "reason"),
    [
        ("broken rubric", "break", "the reward function breaks raised RuntimeError: the rubric is broken"),
        ("broken rubric", "nan", "the reward is nan"),
        ("guess", "raise", "the environment raised RuntimeError: the environment is broken"),
        ("guess", "report", "the environment reports InfraError('no server')"),
        ("guess", "rewrite", "the environment rewrites earlier messages"),
    ],
)
def test_what_goes_wrong_is_an_error_of_its_sample(kind: str, answer: str, reason: str) -> None:
    env = make(kind)
    _, result = played(env, answer)
    assert result.errors[0] is not None and reason in result.errors[0] and result.terminateds.tolist() == [True]
    if kind == "broken rubric":
        assert played(env, "fine")[1].rewards.tolist() == [0.25]


@needs_verifiers
def test_environments_that_cannot_be_played_are_refused_and_signals_stay() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.signal
    make("single")
    with pytest.raises(ConfigError, match="needs tools"):
        make("tools")
    with pytest.raises(ConfigError, match="cannot be loaded: .*no kind 'other'"):
        make("other")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.signal) == before


@needs_verifiers
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_an_actor_plays_episodes() -> None:
    client = create_env("verifiers", {"id": "verifiers_for_tests", "kwargs": {"kind": "guess"}}, step_timeout_s=60.0)

    async def play() -> list[Any]:
        start = await client.open_episode({"seed": 4, "split": "train"}, 0)
        first = await client.step([{"role": "assistant", "content": "1"}], start.metadata)
        last = await client.step([{"role": "assistant", "content": "6"}], first.metadata)
        await client.close_episode(last.metadata)
        return [start, first, last]

    try:
        start, first, last = asyncio.run(play())
        assert start.observation == {"role": "user", "content": "3+3="} and not first.terminated
        assert (last.reward, last.error, client.num_restarts) == (1.0, None, 0)
    finally:
        client.shutdown()


@pytest.mark.fast
def test_a_prompt_may_get_several_messages() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    observation = {"role": "user", "content": "Add.\n2+2=", "messages": messages}
    entry = ObservationRenderer(tokenizer).first_of_prompt(Chat(messages=[], tools=None), observation)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert torch.tensor(expected).equal(entry["token_ids"])
