"""Environments of other libraries, with the real packages where they are installed."""

import random
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.workers.loading import load_env_class
from nemo_rl.kits.adapters.packages import library
from nemo_rl.kits.adapters.replayed_game import GameAnswer, ReplayedGame
from nemo_rl.utils.errors import ConfigError


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def make(name, **cfg):
    env_class, _ = load_env_class(env_class_path(name))
    return env_class(cfg)


def act(env, metadata, action):
    result = env.step([[{"role": "assistant", "content": f"<action>{action}</action>"}]], [metadata])
    return result, result.metadata[0]


def opened(env, seed=4, episode_seed=9):
    start = env.open_episode({"seed": seed, "split": "train", "episode_seed": episode_seed})
    return start.metadata, start.observation["content"]


class Dice(ReplayedGame[list[int]]):
    """Throws dice of the global generators; counts how often a game is opened."""

    num_opened = 0
    num_closed = 0

    def open_game(self, seed, episode_seed):
        self.num_opened += 1
        return [random.randrange(100)], "throw"

    def act(self, handle, action):
        handle.append(random.randrange(100) + 100 * int(np.random.randint(100)))
        return GameAnswer(str(handle), 0.5, len(handle) == 6, is_valid=action == "throw")

    def close_game(self, handle):
        self.num_closed += 1


def test_a_game_is_replayed_after_a_restart():
    """Games that are interleaved, and one that another process continues, show the same dice."""
    game, other = Dice(), Dice()
    states = [game.start(3, "train", episode).state for episode in (1, 2)]
    before = random.getstate()
    for _ in range(4):
        states = [game.play(state, "throw").state for state in states]
    assert random.getstate() == before, "the generator of the process is as it was"
    turns = [game.play(state, "throw") for state in states]
    assert game.num_opened == 2
    assert [other.play(state, "throw") for state in states] == turns
    assert turns[0].text != turns[1].text, "samples of a prompt throw different dice"
    assert (turns[0].result, turns[0].reward) == ("finished", 0.5)
    assert game.play(states[0], "throw") == turns[0], "a state can be played again"
    assert (game.num_opened, game.num_closed) == (3, 1)
    game.close(turns[0].state)
    game.close(turns[0].state)
    assert game.num_closed == 2
    game.close_all()
    assert game.num_closed == 3


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "nemo_rl.kits.adapters.gymnasium", raising=False)
    with pytest.raises(ConfigError, match=r"gymnasium, which is not installed. Install it with `uv sync --extra gymn"):
        load_env_class(env_class_path("gymnasium"))
    with pytest.raises(ConfigError, match=r"`pip install nemo-rl\[reasoning-gym\]`"):
        library("no_such_module", "reasoning-gym")


@needs("gymnasium")
def test_gymnasium_is_played_as_text():
    env = make(
        "gymnasium",
        id="FrozenLake-v1",
        kwargs={"is_slippery": False},
        action_names=["left", "down", "right", "up"],
        rendered=True,
        instructions="Cross the lake.",
    )
    metadata, text = opened(env)
    assert text.startswith("Cross the lake.\nActions: left, down, right, up. Answer with one action, for example <ac")
    assert text.count("F") == 10 and text.endswith("</environment>")
    result, metadata = act(env, metadata, "jump")
    assert result.observations[0]["content"] == "Invalid action: jump"
    for action in ("down", "down", "right", "right", "down", "right"):
        result, metadata = act(env, metadata, action)
    assert (result.rewards.item(), result.terminateds.item()) == (1.0, True)
    assert (metadata["result"], metadata["num_moves"], metadata["invalid_actions"]) == ("finished", 7, 1)
    env.close_episode(metadata)
    env.shutdown()


@needs("gymnasium")
def test_gymnasium_draws_with_the_seed_of_the_episode():
    """Slippery ice: the same seeds give the same way again, in another process too; another episode differs."""

    def way(env, episode_seed):
        metadata, _ = opened(env, episode_seed=episode_seed)
        texts = []
        for _ in range(12):
            result, metadata = act(env, metadata, "1")
            texts.append(result.observations[0]["content"])
            if result.terminateds.item():
                break
        return texts

    env, again = (make("gymnasium", id="FrozenLake-v1", max_moves=12) for _ in range(2))
    ways = [way(env, seed) for seed in range(6)]
    assert [way(again, seed) for seed in range(6)] == ways
    assert len({str(texts) for texts in ways}) > 1


@needs("gymnasium")
@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"id": "NoSuch-v0"}, "env.gymnasium.id='NoSuch-v0' with kwargs={} cannot be made"),
        ({"id": "Pendulum-v1"}, "has actions Box.*; text needs discrete ones"),
        ({"id": "FrozenLake-v1", "action_names": ["a", "a", "b", "c"]}, "has 3 different names; FrozenLake-v1 has 4"),
        ({"id": "FrozenLake-v1", "kwargs": {"ice": 1}}, "cannot be made"),
    ],
)
def test_wrong_settings_of_gymnasium_are_refused(cfg, words):
    with pytest.raises(ConfigError, match=words):
        make("gymnasium", **cfg)


@needs("textarena")
def test_textarena_is_played_to_the_end():
    env = make("textarena", id="TowerOfHanoi-v0")
    metadata, text = opened(env)
    assert "move the disks from tower A to tower C" in text and text.endswith(
        "in the form that the rules above ask for."
    )
    for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C"):
        result, metadata = act(env, metadata, f"[{move}]")
    assert (result.rewards.item(), result.terminateds.item(), metadata["result"]) == (1.0, True, "finished")
    assert metadata["invalid_actions"] == 0


@needs("textarena")
def test_textarena_shows_what_is_new_and_counts_invalid_actions():
    env, restarted = make("textarena", id="TowerOfHanoi-v0"), make("textarena", id="TowerOfHanoi-v0")
    metadata, _ = opened(env)
    result, metadata = act(env, metadata, "[A C]")
    text = result.observations[0]["content"]
    assert "You moved disk 1 from A to C" in text and "You are playing" not in text
    wrong, after = act(env, metadata, "[A C]")
    assert (after["invalid_actions"], wrong.terminateds.item()) == (1, False)
    repeated, state = act(restarted, metadata, "[A C]")
    assert repeated.observations == wrong.observations and state == after


@needs("textarena")
def test_an_unknown_game_of_textarena_is_refused():
    with pytest.raises(ConfigError, match="env.textarena.id='NoSuchGame-v0' with kwargs={} cannot be played alone"):
        make("textarena", id="NoSuchGame-v0")


@needs("reasoning_gym")
def test_reasoning_gym_scores_answers():
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    env = make("reasoning_gym", dataset="chain_sum", kwargs={"max_terms": 2, "max_digits": 2})
    starts = [env.open_episode({"seed": seed, "episode_seed": 0}) for seed in (3, 3, 8)]
    questions = [start.observation["content"] for start in starts]
    assert questions[0] == questions[1] != questions[2]
    numbers = questions[0].partition("problem: ")[2].partition("=")[0]
    texts = [f"<answer>1</answer> or <answer> {eval(numbers)} </answer>", "no idea", "<answer>x</answer>"]
    logs = [[{"role": "assistant", "content": text}] for text in texts]
    result = env.step(logs, [start.metadata for start in starts], return_extracted_answer=True)
    assert result.rewards[:2].tolist() == [1.0, 0.0] and result.rewards[2] < 1
    assert result.answers == [str(eval(numbers)), None, "x"] and result.terminateds.all()
    batch = BatchedDataDict(extra_env_info=result.metadata, total_reward=torch.tensor([1.0, 0.0, 0.5]))
    _, metrics = env.global_post_process_and_metrics(batch)
    assert metrics == {"score": 0.5, "answered": pytest.approx(2 / 3)}


@needs("reasoning_gym")
@pytest.mark.parametrize("cfg", [{"dataset": "no_such_task"}, {"dataset": "chain_sum", "kwargs": {"min_terms": -1}}])
def test_wrong_settings_of_reasoning_gym_are_refused(cfg):
    with pytest.raises(ConfigError, match="env.reasoning_gym.dataset=.* cannot be made"):
        make("reasoning_gym", **cfg)
