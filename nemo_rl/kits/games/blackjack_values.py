"""Expected rewards of Blackjack, exactly: of the optimal policy, of random play, and of any other policy.

The endless deck makes the cards independent, so the values follow by recursion over hands. Invariant: the rules are
those of `blackjack`; a test compares the values with games that are played.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from statistics import fmean
from typing import NamedTuple

from nemo_rl.kits.games.blackjack import CARDS, DEALER_STANDS_AT, hand_value, is_held_out


class Hands(NamedTuple):
    """A situation of the player."""

    value: int
    """Value of the own hand."""
    soft: bool
    """Whether an ace counts 11 in it."""
    dealer: int
    """The dealer's card that is shown."""


type Policy = Callable[[Hands], float]
"""Situation -> probability of `hit`."""


def random_policy(hands: Hands) -> float:
    """Return the probability of `hit` of a player who chooses at random."""
    return 0.5


def optimal_policy(hands: Hands) -> float:
    """Return 1.0 where `hit` has the larger expected reward, 0.0 where `stand` has it."""
    return float(hit_value(hands) > stand_value(hands))


def expected_reward(policy: Policy, split: str | None = None) -> float:
    """Return the expected reward of a policy over the starts of an episode.

    Args:
        policy: a probability of `hit` for each situation.
        split: "train" or "validation": only the starts of these episodes; None: all.
    """

    @cache
    def value(hands: Hands) -> float:
        chance = policy(hands)
        hit = _mean_after_card(hands, value) if chance > 0 else 0.0
        return chance * hit + (1 - chance) * stand_value(hands)

    return fmean(value(hands) for hands in starts(split))


def starts(split: str | None = None) -> Iterator[Hands]:
    """Yield the situations at the start, as often as they are likely; without 21 in two cards."""
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
    """Return the mean over the next card of the value of the new situation, -1 above 21."""
    after = [_with_card(hands.value, hands.soft, card) for card in CARDS]
    return fmean(-1.0 if value > 21 else value_of(Hands(value, soft, hands.dealer)) for value, soft in after)


def _with_card(value: int, soft: bool, card: int) -> tuple[int, bool]:
    hard = value - 10 * soft + card
    soft = (soft or card == 1) and hard + 10 <= 21
    return hard + 10 * soft, soft


@cache
def _dealer_ends(value: int, has_ace: bool, num_cards: int) -> dict[tuple[int, bool], float]:
    """Return the chance of each final hand of the dealer, given the hard value so far: (value, 21 in two cards)."""
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
