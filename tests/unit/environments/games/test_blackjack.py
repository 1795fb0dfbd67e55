"""Blackjack: rules, cards by seed, and the exact values against games that are played."""

import random
from collections import Counter

import pytest

from nemo_rl.kits.games.blackjack import (
    BlackjackEnv,
    BlackjackGame,
    Hands,
    expected_reward,
    hand_value,
    hit_value,
    is_held_out,
    optimal_policy,
    random_policy,
    situation,
    stand_value,
    starts,
)


def hands_of(state):
    return Hands(*hand_value(state["player"]), state["dealer"])


@pytest.mark.parametrize(
    ("cards", "value"),
    [((1, 10), (21, True)), ((1, 1), (12, True)), ((1, 5, 10), (16, False)), ((10, 6), (16, False))],
)
def test_an_ace_counts_eleven_where_it_can(cards, value):
    assert hand_value(cards) == value


def test_the_optimal_policy_is_the_published_one():
    """Figure 5.2 of Sutton and Barto: for each value, the dealer's cards (1 is the ace) against which to hit."""
    against = {soft: {} for soft in (True, False)}
    for soft, low in ((True, 11), (False, 11)):
        for value in range(low, 22):
            cards = [card for card in range(1, 11) if optimal_policy(Hands(value, soft, card))]
            against[soft][value] = cards
    everything, strong = list(range(1, 11)), [1, 7, 8, 9, 10]
    assert against[False] == {
        11: everything,
        12: [1, 2, 3, 7, 8, 9, 10],
        **dict.fromkeys(range(13, 17), strong),
        **dict.fromkeys(range(17, 22), []),
    }
    assert {value: against[True][value] for value in range(12, 22)} == {
        **dict.fromkeys(range(12, 18), everything),
        18: [1, 9, 10],
        **dict.fromkeys(range(19, 22), []),
    }


@pytest.mark.parametrize(("policy", "expected"), [(random_policy, -0.430274), (optimal_policy, -0.096417)])
def test_values_are_those_of_played_games(policy, expected):
    """10,000 games of training, within four standard errors (a reward is at most 1)."""
    game, rng, num_games = BlackjackGame(), random.Random(7), 10_000
    total = 0.0
    for seed in range(num_games):
        state, turn = game.start(seed, "train", seed).state, None
        while turn is None or turn.result is None:
            turn = game.play(state, "hit" if rng.random() < policy(hands_of(state)) else "stand")
            state = turn.state
        total += turn.reward
    assert total / num_games == pytest.approx(expected_reward(policy, "train"), abs=4 / num_games**0.5)
    assert expected_reward(policy) == pytest.approx(expected, abs=1e-6)


def test_values_of_both_splits_average_to_that_of_all():
    sizes = {split: len(list(starts(split))) for split in ("train", "validation", None)}
    assert sizes[None] == 13**3 - 2 * 4 * 13, "an ace and a ten are 21 in two cards"
    parts = sum(expected_reward(optimal_policy, split) * sizes[split] for split in ("train", "validation"))
    assert parts / sizes[None] == pytest.approx(expected_reward(optimal_policy))


def test_published_chances_of_the_dealer():
    """With 16 or less, standing wins only if the dealer exceeds 21: 42.3 % of games with a 6, 21.2 % with a 10."""
    assert (1 + stand_value(Hands(16, False, 6))) / 2 == pytest.approx(0.423, abs=5e-4)
    assert (1 + stand_value(Hands(16, False, 10))) / 2 == pytest.approx(0.212, abs=5e-4)
    assert hit_value(Hands(21, False, 10)) == -1.0


def test_cards_derive_from_the_seeds():
    """The start from the row's seed; later cards from the seed of the episode, the same again after a restart."""
    game = BlackjackGame()
    first, again, other = (game.start(3, "train", seed).state for seed in (10, 10, 11))
    assert (first, first["player"], first["dealer"]) == (again, other["player"], other["dealer"])
    hits = [
        [game.play(game.start(3, "train", seed).state, "hit").state["player"][2] for seed in range(400)] for _ in "ab"
    ]
    assert hits[0] == hits[1]
    shares = Counter(hits[0])
    assert shares[10] / 400 == pytest.approx(4 / 13, abs=0.1) and len(shares) == 10


def test_splits_share_no_start():
    game = BlackjackGame()
    for split in ("train", "validation"):
        states = [game.start(seed, split, 0).state for seed in range(300)]
        assert all(is_held_out(s["player"], s["dealer"]) == (split == "validation") for s in states)
        assert len({situation(s) for s in states}) > 50


def test_an_episode_through_the_environment():
    env = BlackjackEnv({"max_moves": 3})
    state = {"player": [10, 6], "dealer": 1, "seed": 0, "num_cards": 0}
    start = env.open_episode({"game_state": state})
    log = [{"role": "assistant", "content": "<action>double</action>"}]
    result = env.step([log], [start.metadata])
    assert result.observations[0]["content"] == (
        "Invalid action: double\n<environment>\nhand 10 6 is 16\ndealer A\n</environment>"
    )
    assert (result.rewards.item(), result.terminateds.item()) == (0.0, False)
    stand = env.step([[{"role": "assistant", "content": "<action>stand</action>"}]], result.metadata)
    assert stand.terminateds.item() and stand.metadata[0]["result"] in ("won", "lost")
    used_up = env.step([log], [{**start.metadata, "num_moves": 2}])
    assert (used_up.rewards.item(), used_up.metadata[0]["result"]) == (-1.0, "lost")
    batch, metrics = env.global_post_process_and_metrics({"extra_env_info": [stand.metadata[0], used_up.metadata[0]]})
    assert metrics["lost"] + metrics["won"] == 1.0 and metrics["invalid_actions"] == 1.0
