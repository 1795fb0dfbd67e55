"""Decimal rewards in float32 give the advantages of exact fractions: noise of their sums is never divided by itself."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.turns import with_total
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig

pytestmark = pytest.mark.fast
EPSILON = 1e-6

type Decimals = list[list[str]]


def in_float32(turns: Decimals) -> list[list[float]]:
    """Return rewards as environments give them: float32 numbers."""
    return [torch.tensor([float(each) for each in row], dtype=torch.float32).tolist() for row in turns]


def found(turns: Decimals, *, total_dtype: torch.dtype = torch.float64, **options) -> list[list[float]]:
    """Return the advantage of each turn; samples may have fewer turns than others."""
    longest = max(map(len, turns))
    rows = [row + [0.0] * (longest - len(row)) for row in in_float32(turns)]
    spans = [[[n, n + 1] if n < len(row) else [0, 0] for n in range(longest)] for row in turns]
    mask = torch.tensor([[float(n < len(row)) for n in range(longest)] for row in turns])
    rewards = torch.tensor(rows, dtype=torch.float64)
    totals = torch.tensor([sum(row) for row in rows], dtype=torch.float64)
    grpo = GRPOConfig.build(adv_estimator={"name": "grpo", **options})
    advantages = make_advantage_estimator(grpo, ClippedPGLossConfig.build()).compute_advantage(
        None,
        totals.float(),
        mask,
        group_ids=torch.zeros(len(turns), dtype=torch.int64),
        valid_mask=torch.ones(len(turns)),
        turn_rewards=rewards,
        total_rewards=totals.to(total_dtype),
        turn_spans=torch.tensor(spans),
    )
    return [row[: len(turns[number])] for number, row in enumerate(advantages.tolist())]


def exact(turns: Decimals, credit: str, discount: Fraction, leave_one_out: bool) -> list[list[float]]:
    """Compute the same with fractions; only the root and what is added to it are floats."""
    rewards = [[Fraction(each) for each in row] for row in turns]
    compared = [sums(row, discount) for row in rewards] if credit == "turn_returns" else rewards
    results = [[0.0] * len(row) for row in rewards]
    for turn in range(max(map(len, rewards))):
        here = [number for number, row in enumerate(rewards) if turn < len(row)]
        for number in here:
            others = [compared[n][turn] for n in here if n != number or not leave_one_out]
            if len(here) == 1:
                continue
            mean = Fraction(sum(others), len(others))
            advantage = compared[number][turn] - mean
            variance = sum((each - mean) ** 2 for each in others) / max(len(others) - 1, 1)
            divisor = math.sqrt(variance) + EPSILON if variance else 1.0
            results[number][turn] = float(advantage) / divisor
    if credit == "turn_rewards":
        results = [sums(row, float(discount)) for row in results]
    return results


def sums(values: list, discount) -> list:
    out, later = [], 0
    for value in reversed(values):
        later = value + discount * later
        out.append(later)
    return out[::-1]


FIRST = [["0.3", "0.6"], ["0.1", "0.6"], ["0.2", "0.6"], ["0.1", "0.55"]]
SECOND = [["0.1", "0.6"], ["0.7", "0"], ["0.7", "0"], ["0.8", "0"]]
THIRD = [["0.1", "1"], ["0", "1"], ["0.1", "1"], ["0.1", "0"]]


@pytest.mark.parametrize("total_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("turns", "credit", "discount", "last"),
    [
        (FIRST, "turn_returns", "1", (None, -0.05)),
        (FIRST, "turn_returns", "0.9", (None, -0.05)),
        (FIRST, "turn_rewards", "1", (-1.05, -0.05)),
        (SECOND, "turn_returns", "1", (0.1, None)),
        (THIRD, "turn_returns", "1", (-16.7, -1.0)),
    ],
)
def test_samples_that_are_compared_with_equal_ones_are_not_divided_by_noise(
    turns: Decimals, credit: str, discount: str, last: tuple[float | None, float | None], total_dtype: torch.dtype
) -> None:
    ours = found(turns, credit=credit, turn_discount=float(discount), total_dtype=total_dtype)
    for mine, right in zip(ours[-1], last, strict=True):
        assert right is None or mine == pytest.approx(right, abs=0.06)
    check(ours, exact(turns, credit, Fraction(discount), leave_one_out=True))


def check(ours: list[list[float]], right: list[list[float]]) -> None:
    for mine, expected in zip(ours, right, strict=True):
        assert mine == pytest.approx(expected, rel=3e-4, abs=3e-6), (ours, right)


@pytest.mark.parametrize("credit", ["turn_returns", "turn_rewards"])
def test_the_largest_advantage_of_the_whole_group_is_small(credit: str) -> None:
    options = {"credit": credit, "use_leave_one_out_baseline": False}
    for turns in (FIRST, SECOND, THIRD):
        ours = found(turns, **options)
        assert max(abs(each) for row in ours for each in row) < 3.0
        check(ours, exact(turns, credit, Fraction(1), leave_one_out=False))


decimals = st.integers(-30, 30).map(lambda number: str(Fraction(number, 20).limit_denominator(20)))
groups = st.lists(st.lists(decimals, min_size=1, max_size=4), min_size=2, max_size=6)
few = st.sampled_from(["0", "0.1", "0.2", "0.3", "0.6", "0.7", "-0.3", "1"])
similar = st.lists(st.lists(few, min_size=2, max_size=3), min_size=3, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    turns=st.one_of(groups, similar),
    credit=st.sampled_from(["turn_returns", "turn_rewards"]),
    discount=st.sampled_from(["1", "0.9", "0.5", "0"]),
    leave_one_out=st.booleans(),
)
def test_random_decimal_rewards_have_the_advantages_of_fractions(
    turns: Decimals, credit: str, discount: str, leave_one_out: bool
) -> None:
    turns = [[str(float(Fraction(each))) for each in row] for row in turns]
    options = {"credit": credit, "turn_discount": float(discount), "use_leave_one_out_baseline": leave_one_out}
    check(found(turns, **options), exact(turns, credit, Fraction(discount), leave_one_out))


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.lists(few, min_size=2, max_size=4), min_size=3, max_size=8), leave_one_out=st.booleans())
def test_totals_that_are_sums_in_float32_have_the_advantages_of_fractions(parts: Decimals, leave_one_out: bool) -> None:
    """Without credit by turns: the reward of a sample is a float32 sum of components."""
    totals = torch.tensor([sum(torch.tensor(row)) for row in in_float32(parts)])
    grpo = GRPOConfig.build(adv_estimator={"name": "grpo", "use_leave_one_out_baseline": leave_one_out})
    ours = make_advantage_estimator(grpo, ClippedPGLossConfig.build()).compute_advantage(
        None, totals, torch.ones(len(parts), 1), group_ids=torch.zeros(len(parts), dtype=torch.int64)
    )
    whole = [[str(sum(map(Fraction, row)))] for row in parts]
    if max(abs(Fraction(row[0])) for row in whole) >= Fraction(1, 10):  # else nothing tells noise from a reward
        check(ours.tolist(), exact(whole, "turn_rewards", Fraction(0), leave_one_out))


def test_what_shaping_took_is_in_the_last_turn_and_noise_is_not() -> None:
    turns, has = torch.tensor([[0.1, 0.6], [0.1, 0.6]], dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    shaped = with_total(turns, has, torch.tensor([0.7, 0.7 - 1e-3]))
    assert shaped[0].tolist() == [0.1, 0.6]
    assert shaped[1].tolist() == pytest.approx([0.1, 0.599])
