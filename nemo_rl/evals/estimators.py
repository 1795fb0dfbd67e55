"""Scores of one prompt from n graded answers: pass@k and cons@k.

Pure functions of plain numbers. Invariant: a score is the expected result of drawing k of the n answers, so it does not
depend on their order.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k answers, drawn from the n there are, is right.

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv 2107.03374, equation 1).

    Args:
        num_samples: n, the answers to the prompt.
        num_correct: c, how many of them are right.
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
    """Probability that the majority of k answers, drawn from the n there are, is right.

    Equal texts are one vote together; an answer that is None does not vote. Answers with equally many votes
    win with equal probability. Where copies of one text were graded differently, it is right to that share.

    Computed exactly: for each right text g and each number j of its votes, count the ways in which the other
    drawn answers give no other text more than j votes (`_ways_below`).

    Args:
        answers: the extracted answer of each sample, in a normal form.
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
        raise ValueError(f"cons@{k} of {n} answers and {len(correct)} grades: needs as many grades, 1 <= k <= n")
    grades: dict[str, list[bool]] = defaultdict(list)
    for answer, grade in zip(answers, correct, strict=True):
        if answer is not None:
            grades[answer].append(grade)
    num_silent = n - sum(map(len, grades.values()))
    wins = Fraction(0)
    for text, copies in grades.items():
        if any(copies):
            others = [len(rest) for name, rest in grades.items() if name != text]
            wins += Fraction(sum(copies), len(copies)) * _wins(len(copies), others, num_silent, k)
    return float(wins / comb(n, k))


def _wins(num_copies: int, others: Sequence[int], num_silent: int, k: int) -> Fraction:
    """Ways to draw k answers in which a text with `num_copies` copies wins; a tie of t + 1 counts 1 / (t + 1)."""
    wins = Fraction(0)
    for votes in range(1, min(num_copies, k) + 1):
        ways = _ways_below(others, votes, k - votes)
        for (used, ties), count in ways.items():
            silent = comb(num_silent, k - votes - used)
            wins += Fraction(comb(num_copies, votes) * count * silent, ties + 1)
    return wins


def _ways_below(sizes: Sequence[int], limit: int, room: int) -> Counter[tuple[int, int]]:
    """Ways to draw at most `room` answers from texts of these sizes, none of them more than `limit` times.

    Returns:
        Number of ways by (answers drawn, texts drawn exactly `limit` times).
    """
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})
    for size in sizes:
        longer: Counter[tuple[int, int]] = Counter()
        for (used, ties), count in ways.items():
            for drawn in range(min(size, limit, room - used) + 1):
                longer[used + drawn, ties + (drawn == limit)] += count * comb(size, drawn)
        ways = longer
    return ways
