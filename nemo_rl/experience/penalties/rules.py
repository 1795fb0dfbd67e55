"""Penalties: each says in which turns of an answer something is wrong.

Invariant: a penalty sees what the model wrote and nothing else, neither the reward nor other answers, so it says the
same wherever and whenever an answer is looked at.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.experience.penalties.thinking import SampledTurn
from nemo_rl.utils.named_parts import Registry

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|\w+")
"""A word, or a character of a script that is written without spaces."""
_RUN = 8
"""Words that have to be equal in a row to count as repeated."""
_FEWEST_WORDS = 40
"""Words of reasoning below which nothing counts as a repetition."""
_COPIED = 0.8
"""Share of the runs of the reasoning that a final answer has, from which on it repeats the reasoning."""
_REPEATED = 1 / 3
"""Share of the runs of the reasoning that occur earlier in it, above which it repeats itself."""


class RewardPenalty(Protocol):
    """A penalty; each process that plays rollouts constructs its own object."""

    def offending(self, turns: Sequence[SampledTurn]) -> Collection[int]:
        """Return the numbers, from 0, of the turns in which something is wrong.

        Args:
            turns: all sampled turns of one answer.
        """


class MalformedThinkTag:
    """Thinking tags out of place; see `SampledTurn.malformed`."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """See `RewardPenalty.offending`."""
        return [number for number, turn in enumerate(turns) if turn.malformed]


class EmptyFinalAnswer:
    """Nothing but white space and special tokens after the thinking, or thinking that does not end."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """See `RewardPenalty.offending`."""
        return [number for number, turn in enumerate(turns) if not turn.final_answer.strip()]


class DuplicatedReasoning:
    """A final answer that repeats the reasoning, or reasoning that repeats itself; see `repeats`."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """See `RewardPenalty.offending`."""
        return [number for number, turn in enumerate(turns) if repeats(turn.reasoning, turn.final_answer)]


@dataclass(frozen=True)
class UnwantedTokens:
    """Tokens that must not be sampled."""

    token_ids: frozenset[int]

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """See `RewardPenalty.offending`."""
        return [number for number, turn in enumerate(turns) if not self.token_ids.isdisjoint(turn.token_ids)]


def repeats(reasoning: Sequence[str], final_answer: str) -> bool:
    """Return whether a final answer repeats its reasoning, or the reasoning repeats itself.

    What is compared are runs of 8 words, without case, punctuation and white space. Reasoning of less than 40 words
    never counts as repeated. The reasoning repeats itself if more than a third of its runs occur earlier in it. The
    answer repeats it if it has at least 80 % of the reasoning's runs.

    Args:
        reasoning: texts of the thinking.
        final_answer: text after it.
    """
    words = _words(" ".join(reasoning))
    if len(words) < _FEWEST_WORDS:
        return False
    runs = _runs(words)
    different = set(runs)
    if len(runs) - len(different) > _REPEATED * len(runs):
        return True
    return len(different & set(_runs(_words(final_answer)))) >= _COPIED * len(different)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)]


PENALTIES: Registry[RewardPenalty] = Registry("reward penalty", RewardPenalty)
"""Penalties of the user's own (`reward_penalties.own`), constructed with their `kwargs`."""
