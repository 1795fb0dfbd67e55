"""Generalised advantage estimation against its definition and against cases computed by hand."""

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.credit.token_credit import CountedTokens, gae, length_adaptive_lambda

INF = float("inf")


def by_definition(
    rewards: list[float], values: list[float], after: float, gamma: float, lam: float, counts: list[bool]
) -> list[float]:
    """Equation 16 of arXiv 1506.02438 as a double sum in plain Python, over the tokens that count."""
    places = [place for place, counted in enumerate(counts) if counted]
    states = [values[place] for place in places] + [after]
    deltas = [rewards[place] + gamma * states[k + 1] - states[k] for k, place in enumerate(places)]
    advantages = [0.0] * len(counts)
    for k, place in enumerate(places):
        advantages[place] = sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(places)))
    return advantages


def estimate(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: Tensor, after: Tensor | None = None
) -> Tensor:
    tokens = CountedTokens.of(mask)
    after_B = torch.zeros(len(mask)) if after is None else after
    found = gae(
        tokens, tokens.take(rewards), tokens.take(values), after_B=after_B, gamma=gamma, lambda_B=lam.expand(len(mask))
    )
    return tokens.put(found)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0), (0.0, 0.7), (1.0, 1.0)])
def test_advantages_equal_the_double_sum_of_the_definition(gamma: float, lam: float) -> None:
    """Masks have holes, as observations make them, and rows of every number of tokens, also of none."""
    torch.manual_seed(3)
    mask = (torch.rand(9, 23) < 0.6).float()
    mask[3], mask[4, 1:], mask[5] = 0, 0, 1
    rewards, values, after = torch.randn(9, 23).double(), torch.randn(9, 23).double(), torch.randn(9).double()
    rewards[mask == 0], values[mask == 0] = torch.nan, INF
    found = estimate(rewards, values, mask, gamma=gamma, lam=torch.tensor(lam, dtype=torch.float64), after=after)
    for row in range(9):
        want = by_definition(
            rewards[row].tolist(), values[row].tolist(), float(after[row]), gamma, lam, (mask[row] != 0).tolist()
        )
        torch.testing.assert_close(found[row], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_case_by_hand() -> None:
    """Three tokens with values 0.5, 0.25, 1 and a reward of 2 at the end; gamma 0.5, lambda 0.5."""
    mask = torch.tensor([[0.0, 1, 1, 1, 0]])
    values = torch.tensor([[9.0, 0.5, 0.25, 1.0, 9.0]])
    rewards = torch.tensor([[9.0, 0.0, 0.0, 2.0, 9.0]])
    # delta = 0.5 * 0.25 - 0.5, 0.5 * 1 - 0.25, 2 - 1
    want = [0, -0.375 + 0.25 * (0.25 + 0.25 * 1), 0.25 + 0.25 * 1, 1.0, 0]
    found = estimate(rewards, values, mask, gamma=0.5, lam=torch.tensor(0.5))
    assert found.tolist() == [want]


def test_an_observation_is_no_step() -> None:
    """The same tokens with and without an observation between them have the same advantages."""
    together = estimate(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3), gamma=0.9, lam=torch.ones(1)
    )
    apart = estimate(
        torch.tensor([[0.0, 5.0, 5.0, 0.0, 1.0]]),
        torch.tensor([[0.1, 7.0, 8.0, 0.2, 0.3]]),
        torch.tensor([[1.0, 0, 0, 1, 1]]),
        gamma=0.9,
        lam=torch.ones(1),
    )
    assert apart[0, [0, 3, 4]].tolist() == together[0].tolist()
    assert apart[0, [1, 2]].tolist() == [0.0, 0.0]


def test_each_sample_has_its_lambda() -> None:
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(2, 5), torch.randn(2, 5), torch.ones(2, 5)
    both = estimate(rewards, values, mask, gamma=1.0, lam=torch.tensor([0.3, 0.8]))
    for row, lam in enumerate((0.3, 0.8)):
        alone = estimate(rewards[[row]], values[[row]], mask[[row]], gamma=1.0, lam=torch.tensor([lam]))
        torch.testing.assert_close(both[[row]], alone, rtol=1e-6, atol=1e-6)


def test_the_lambda_of_a_long_answer_is_near_one() -> None:
    found = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 2000]), 0.05)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.99]).double())


def test_nothing_counts() -> None:
    found = estimate(torch.randn(2, 4), torch.randn(2, 4), torch.zeros(2, 4), gamma=1.0, lam=torch.ones(1))
    assert found.tolist() == [[0.0] * 4] * 2
