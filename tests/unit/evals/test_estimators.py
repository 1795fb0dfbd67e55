"""pass@k and cons@k against all subsets, one by one."""

import itertools
import random
from math import comb

import pytest

from nemo_rl.evals.report import consensus_at_k, pass_at_k

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_agrees_with_the_product_formula_of_the_paper() -> None:
    n, c, k = 200, 13, 50
    product = 1.0
    for i in range(n - c + 1, n + 1):
        product *= 1 - k / i
    assert pass_at_k(n, c, k) == pytest.approx(1 - product, abs=1e-12)
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(200, 200, 1) == 1.0
    assert pass_at_k(10, 3, 1) == 0.3


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= c <= n"):
        pass_at_k(n, c, k)


def _majority_by_hand(answers: list[str | None], correct: list[bool], k: int) -> float:
    """Vote in each subset of k answers, in their order; the first of a tie wins, None is an answer like any other."""
    right = 0
    for chosen in itertools.combinations(range(len(answers)), k):
        texts = [answers[i] for i in chosen]
        most = max(texts.count(text) for text in texts)
        winner = next(i for i in chosen if texts.count(answers[i]) == most)
        right += correct[winner]
    return right / comb(len(answers), k)


@pytest.mark.parametrize("seed", range(40))
def test_consensus_is_the_mean_of_all_votes(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 9)
    answers = [draw.choice(["1", "2", "3", "4", None][: draw.randint(1, 5)]) for _ in range(n)]
    right = {"1": True, "2": False, "3": seed % 2 == 0, "4": False, None: False}
    correct = [right[answer] if seed % 3 else draw.random() < 0.5 for answer in answers]
    for k in range(1, n + 1):
        assert consensus_at_k(answers, correct, k) == pytest.approx(_majority_by_hand(answers, correct, k), abs=1e-15)


def test_consensus_equals_hand_computed_cases() -> None:
    assert consensus_at_k(["7", "7", "8"], [True, True, False], 3) == 1.0
    assert consensus_at_k(["7", "8"], [True, False], 2) == 1.0  # the first of a tie
    assert consensus_at_k(["8", "7"], [False, True], 2) == 0.0
    assert consensus_at_k([None, None], [False, False], 2) == 0.0
    assert consensus_at_k([None, "7", None], [False, True, False], 3) == 0.0  # None has two votes
    # Draws of two: (7, None) and (7, 8) are ties that 7 wins, (None, 8) has no correct answer.
    assert consensus_at_k(["7", None, "8"], [True, False, False], 2) == pytest.approx(2 / 3)
    assert consensus_at_k(["7", "8", "8"], [True, False, False], 1) == pytest.approx(1 / 3)
    assert consensus_at_k(["7", "7"], [False, True], 2) == 0.0  # the first copy decides
    with pytest.raises(ValueError, match="cons@3"):
        consensus_at_k(["1", "2"], [True, False], 3)


def test_consensus_of_many_answers_is_computed_quickly() -> None:
    draw = random.Random(0)
    answers = [str(draw.randint(0, 40)) for _ in range(64)]
    assert 0 < consensus_at_k(answers, [answer < "2" for answer in answers], 32) < 1
