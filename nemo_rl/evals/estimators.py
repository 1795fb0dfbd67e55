"""Compute scores of one prompt from n graded answers: pass@k and cons@k.

Pure functions of plain numbers. Invariant: a score is the expected result of drawing k of the n answers, where every
choice of k is equally likely.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that at least one of k answers, drawn from n, is right.

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv 2107.03374, equation 1).

    Args:
        num_samples: n, the number of answers to the prompt.
        num_correct: c, the number of right answers.
        k: answers drawn without replacement.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right answers in {num_samples}: needs 0 <= c <= n, 1 <= k <= n")
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def consensus_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the probability that the majority of k answers, drawn from n, is right.

    Equal texts vote together, and so do answers that are None. Drawn answers keep their order; among answers with
    equally many votes, the one that comes first wins. If copies of one text were graded differently, the first
    drawn copy decides.

    Computed exactly: for each answer and each number of votes, count the draws in which it is the first copy of its
    text, the text has that many votes, and no other text has more votes, or equally many and comes earlier
    (`_ways_to_lose`).

    Args:
        answers: the extracted answer of each sample, normalized; None if there is none.
        correct: whether each sample was graded as right.
        k: answers drawn without replacement.

    Raises:
        ValueError: the lengths differ, or not 1 <= k <= n.

    Example:
        >>> consensus_at_k(["4", "4", "5"], [True, True, False], 3)
        1.0
    """
    n = len(answers)
    if len(correct) != n or not 1 <= k <= n:
        raise ValueError(f"cons@{k} of {n} answers and {len(correct)} grades: needs equal numbers, 1 <= k <= n")
    places: dict[str | None, list[int]] = defaultdict(list)
    for place, answer in enumerate(answers):
        places[answer].append(place)
    wins = 0
    for first in (place for place, grade in enumerate(correct) if grade):
        later = sum(place > first for place in places[answers[first]])
        others = [
            (len(found), sum(place > first for place in found))
            for text, found in places.items()
            if text != answers[first]
        ]
        for votes in range(1, min(later + 1, k) + 1):
            wins += comb(later, votes - 1) * _ways_to_lose(others, votes, k - votes)
    return float(Fraction(wins, comb(n, k)))


def _ways_to_lose(others: Sequence[tuple[int, int]], votes: int, num_drawn: int) -> int:
    """Count the ways to draw `num_drawn` answers from texts that all lose against an answer with `votes` votes.

    Args:
        others: for each text, its number of copies, and the number that come after the winner's first copy.
        votes: a text may have fewer votes, or equally many if all of its drawn copies come after the winner's.
        num_drawn: total number of answers drawn from these texts.
    """
    ways = [1] + [0] * num_drawn
    for copies, after in others:
        own = [comb(copies, drawn) for drawn in range(votes)] + [comb(after, votes)]
        ways = [
            sum(own[drawn] * ways[total - drawn] for drawn in range(min(votes, total) + 1))
            for total in range(num_drawn + 1)
        ]
    return ways[num_drawn]
