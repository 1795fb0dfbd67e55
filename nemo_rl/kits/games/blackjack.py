"""Blackjack against a dealer with fixed rules, from an endless deck: a game of chance with a known optimal policy.

The rules are those of Sutton and Barto, Reinforcement Learning: An Introduction (2nd edition), example 5.1. Invariant:
the seed of the row determines the hands at the start, and the seed of the episode determines every later card.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from nemo_rl.config.schema.kits import BlackjackConfig
from nemo_rl.kits.games.text_game import GameEnvironment, GameStart, GameTurn, TextGame, observed
from nemo_rl.utils.seed import derive_seed

CARDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
"""Values of the thirteen ranks, which are all equally likely. The value 1 is the ace."""
DEALER_STANDS_AT = 17
HELD_OUT_ONE_IN = 10
"""One start in this number of starts is used only for validation."""

RULES = (
    "Blackjack: come closer to 21 than the dealer, but not above. The ace A counts 11 if the sum allows it, else 1. "
    f"The dealer draws until at least {DEALER_STANDS_AT}. Actions: hit (draw a card), stand.\n"
    "Answer with one action, for example <action>hit</action>"
)


class BlackjackGame(TextGame):
    """The game. The reward is 1 for a win, -1 for a loss, and 0 for equal hands.

    Starts in which the player's two cards have the value 21 are left out, because the player has nothing to decide. A
    dealer with 21 in two cards wins against 21 in more cards.
    """

    results: ClassVar[Sequence[str]] = ("won", "drawn", "lost")
    out_of_moves_reward: ClassVar[float] = -1.0

    def start(self, seed: int, split: str, episode_seed: int) -> GameStart:
        """Deal the hands of a split. One start in ten belongs to validation, and all others belong to training."""
        rng = random.Random(derive_seed(seed, "blackjack"))
        while True:
            player, shown = [rng.choice(CARDS), rng.choice(CARDS)], rng.choice(CARDS)
            is_natural = hand_value(player)[0] == 21
            if not is_natural and is_held_out(player, shown) == (split == "validation"):
                break
        state = {"player": player, "dealer": shown, "seed": episode_seed, "num_cards": 0}
        return GameStart(state, f"{RULES}\n{situation(state)}")

    def play(self, state: dict[str, Any], action: str) -> GameTurn:
        """Take `hit` or `stand`."""
        if action == "hit":
            player = [*state["player"], _card(state["seed"], state["num_cards"])]
            after = {**state, "player": player, "num_cards": state["num_cards"] + 1}
            if hand_value(player)[0] > 21:
                return GameTurn(after, f"{situation(after)}\nAbove 21: you lose.", -1.0, "lost")
            return GameTurn(after, situation(after))
        if action == "stand":
            return self._settled(state)
        return GameTurn(state, f"Invalid action: {action[:40]}\n{situation(state)}", is_valid=False)

    @staticmethod
    def _settled(state: dict[str, Any]) -> GameTurn:
        dealer, drawn = [state["dealer"]], state["num_cards"]
        while hand_value(dealer)[0] < DEALER_STANDS_AT or len(dealer) < 2:
            dealer.append(_card(state["seed"], drawn))
            drawn += 1
        own, other = hand_value(state["player"])[0], hand_value(dealer)[0]
        is_natural = other == 21 and len(dealer) == 2
        reward = 1.0 if other > 21 or own > other else -1.0 if own < other or is_natural else 0.0
        result = {1.0: "won", 0.0: "drawn", -1.0: "lost"}[reward]
        hand = " ".join(map(_name, dealer))
        return GameTurn({**state, "num_cards": drawn}, f"The dealer has {hand}: {result}.", reward, result)


class BlackjackEnv(GameEnvironment):
    """The environment `blackjack`.

    Args:
        cfg: `env.blackjack`: `max_moves`.
    """

    continues_episodes = True
    config_class = BlackjackConfig

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(BlackjackGame(), BlackjackConfig.build(**(cfg or {})).max_moves)


def hand_value(cards: Sequence[int]) -> tuple[int, bool]:
    """Return the value of a hand, and whether an ace counts as 11 in this value."""
    total = sum(cards)
    soft = 1 in cards and total + 10 <= 21
    return total + 10 * soft, soft


def is_held_out(player: Sequence[int], shown: int) -> bool:
    """Return whether hands start episodes of validation. The answer depends on the cards and not on their order."""
    return derive_seed(0, "blackjack", *sorted(player), shown) % HELD_OUT_ONE_IN == 0


def situation(state: Mapping[str, Any]) -> str:
    """Return a text with both hands and the value of the player's hand."""
    value, soft = hand_value(state["player"])
    hand = " ".join(map(_name, state["player"]))
    return observed(f"hand {hand} is {'soft ' if soft else ''}{value}\ndealer {_name(state['dealer'])}")


def _card(seed: int, number: int) -> int:
    """Return the card at an index, from 0, among the cards that are drawn in an episode."""
    return CARDS[derive_seed(seed, "card", number) % len(CARDS)]


def _name(card: int) -> str:
    return "A" if card == 1 else str(card)


class Hands(NamedTuple):
    """Situation that the player knows."""

    value: int
    """Value of the player's hand."""
    soft: bool
    """Whether an ace counts as 11 in the value."""
    dealer: int
    """Visible card of the dealer."""


type Policy = Callable[[Hands], float]
"""Function that returns the probability of `hit` in a situation."""


def random_policy(hands: Hands) -> float:
    """Return the probability of `hit` for a player who chooses at random."""
    return 0.5


def optimal_policy(hands: Hands) -> float:
    """Return 1.0 if `hit` has the larger expected reward, or 0.0 if `stand` has the larger one."""
    return float(hit_value(hands) > stand_value(hands))


def expected_reward(policy: Policy, split: str | None = None) -> float:
    """Return the expected reward of a policy over the starts of an episode.

    Args:
        policy: a probability of `hit` for each situation.
        split: "train" or "validation" for only the starts of this split, or None for all starts.
    """

    @cache
    def value(hands: Hands) -> float:
        chance = policy(hands)
        hit = _mean_after_card(hands, value) if chance > 0 else 0.0
        return chance * hit + (1 - chance) * stand_value(hands)

    return fmean(value(hands) for hands in starts(split))


def starts(split: str | None = None) -> Iterator[Hands]:
    """Yield the situations at the start in proportion to their probabilities, without hands with 21 in two cards."""
    for first, second, shown in product(CARDS, repeat=3):
        value, soft = hand_value((first, second))
        if value < 21 and split in (None, "validation" if is_held_out((first, second), shown) else "train"):
            yield Hands(value, soft, shown)


@cache
def stand_value(hands: Hands) -> float:
    """Return the expected reward of `stand`."""
    ends = _dealer_ends(hands.dealer, hands.dealer == 1, 1)
    return sum(chance * _comparison(hands.value, end, natural) for (end, natural), chance in ends.items())


@cache
def hit_value(hands: Hands) -> float:
    """Return the expected reward of `hit` if every later action is the best one."""
    return _mean_after_card(hands, lambda after: max(hit_value(after), stand_value(after)))


def _mean_after_card(hands: Hands, value_of: Callable[[Hands], float]) -> float:
    """Return the mean value of the situation after the next card, where a hand above 21 has the value -1."""
    after = [_with_card(hands.value, hands.soft, card) for card in CARDS]
    return fmean(-1.0 if value > 21 else value_of(Hands(value, soft, hands.dealer)) for value, soft in after)


def _with_card(value: int, soft: bool, card: int) -> tuple[int, bool]:
    hard = value - 10 * soft + card
    soft = (soft or card == 1) and hard + 10 <= 21
    return hard + 10 * soft, soft


@cache
def _dealer_ends(value: int, has_ace: bool, num_cards: int) -> dict[tuple[int, bool], float]:
    """Return the probability of each final hand of the dealer, as value and whether it is 21 in two cards."""
    soft = has_ace and value + 10 <= 21
    if num_cards > 1 and value + 10 * soft >= DEALER_STANDS_AT:
        return {(value + 10 * soft, value + 10 * soft == 21 and num_cards == 2): 1.0}
    ends: dict[tuple[int, bool], float] = {}
    for card in CARDS:
        for end, chance in _dealer_ends(value + card, has_ace or card == 1, min(num_cards + 1, 3)).items():
            ends[end] = ends.get(end, 0.0) + chance / len(CARDS)
    return ends


def _comparison(own: int, dealer: int, is_natural: bool) -> float:
    if dealer > 21 or own > dealer:
        return 1.0
    return -1.0 if own < dealer or is_natural else 0.0
