"""Advantages of turns: two small groups by hand, loops over floats for random ones, and what is refused."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

# One prompt, three samples. The first turn is two tokens (1, 2), the second one token (4), a third one token (6).
SPANS = torch.tensor([[[1, 3], [4, 5], [6, 7]], [[1, 3], [4, 5], [0, 0]], [[1, 3], [0, 0], [0, 0]]])
REWARDS = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
MASK = torch.tensor([[0.0, 1, 1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]])


def estimator(**options):
    grpo = GRPOConfig.build(adv_estimator={"name": "dr_grpo", **options})
    return make_advantage_estimator(grpo, ClippedPGLossConfig.build())


def advantages(turn_rewards=REWARDS, spans=SPANS, mask=MASK, totals=None, groups=None, valid=None, **options):
    count = len(turn_rewards)
    return estimator(**options).compute_advantage(
        None,
        turn_rewards.sum(1) if totals is None else totals,
        mask,
        group_ids=torch.zeros(count, dtype=torch.int64) if groups is None else groups,
        valid_mask=torch.ones(count) if valid is None else valid,
        turn_rewards=turn_rewards,
        turn_spans=spans,
    )


def at_turns(tokens):
    """The advantages of the first token of each turn: [B, 3]."""
    return tokens[:, [1, 4, 6]]


def test_returns_are_compared_at_the_same_turn():
    # Returns with discount 1/2: (0 + 1/2 + 2/4, 1 + 1, 2), (1 + 0, 0), (2). Means of the turns: 4/3, 1, 2.
    found = at_turns(advantages(credit="turn_returns", turn_discount=0.5))
    expected = [[-1 / 3, 1, 0], [-1 / 3, -1, 0], [2 / 3, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_rewards_are_compared_at_the_same_turn_and_then_summed():
    # Rewards less the mean of their turn: (-1, 1/2, 0), (0, -1/2), (1); then the discounted sums.
    found = at_turns(advantages(credit="turn_rewards", turn_discount=0.5))
    expected = [[-3 / 4, 1 / 2, 0], [-1 / 4, -1 / 2, 0], [1, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_deviation_is_that_of_the_turn():
    # Returns of the first turn 3, 1, 2: deviation 1. Of the second 3, 0: deviation 3 / sqrt(2).
    found = at_turns(
        advantages(name="grpo", credit="turn_returns", normalize_rewards=True, use_leave_one_out_baseline=False)
    )
    half = 1.5 / (3 / math.sqrt(2))
    torch.testing.assert_close(found, torch.tensor([[1, half, 0], [-1, -half, 0], [0, 0, 0]]), atol=1e-5, rtol=0)


def test_leave_one_out_compares_with_the_others():
    found = at_turns(advantages(name="rloo", credit="turn_returns"))  # returns (3, 3, 2), (1, 0), (2)
    torch.testing.assert_close(found, torch.tensor([[1.5, 3, 0], [-1.5, -3, 0], [0, 0, 0]]))


def test_all_tokens_of_a_turn_and_no_others_have_its_advantage():
    found = advantages(credit="turn_returns", turn_discount=0.0)
    assert torch.equal(found[:, 1], found[:, 2])
    assert not found[MASK == 0].any()
    assert found[:, 1].tolist() == [-1.0, 0.0, 1.0]  # with discount 0 a turn has its own reward only


def test_with_one_turn_it_equals_the_advantage_of_the_episode():
    rewards, spans = REWARDS[:, :1], SPANS[:, :1]
    mask = torch.tensor([[0.0, 1, 1, 0]]).expand(3, -1)
    for name in ("grpo", "dr_grpo", "rloo"):
        whole = advantages(rewards, spans, mask, name=name)
        for credit in ("turn_returns", "turn_rewards"):
            torch.testing.assert_close(advantages(rewards, spans, mask, name=name, credit=credit), whole)


def test_a_failed_sample_enters_no_statistic():
    valid = torch.tensor([1.0, 1.0, 0.0])
    found = at_turns(advantages(credit="turn_returns", valid=valid, totals=torch.tensor([3.0, 1.0, 0.0])))
    assert found.tolist() == [[1.0, 1.5, 0.0], [-1.0, -1.5, 0.0], [0.0, 0.0, 0.0]]


def test_a_length_penalty_belongs_to_the_last_turn():
    shaped = torch.tensor([3.0, 1.0, 2.0]) - torch.tensor([1.0, 0.0, 0.0])
    found = at_turns(advantages(credit="turn_rewards", turn_discount=0.0, totals=shaped))
    plain = at_turns(advantages(credit="turn_rewards", turn_discount=0.0))
    torch.testing.assert_close(found, plain)  # the third turn has one sample, so its reward is its own baseline
    cut = at_turns(advantages(credit="turn_returns", totals=shaped))  # returns (2, 2, 1), (1, 0), (2)
    torch.testing.assert_close(cut, torch.tensor([[1 / 3, 1, 0], [-2 / 3, -1, 0], [1 / 3, 0, 0]]))


def test_a_turn_without_tokens_has_no_effect_on_the_others():
    spans = torch.tensor([[[1, 3], [4, 4], [4, 6]], [[1, 3], [4, 5], [0, 0]]])
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0]])
    rewards = torch.tensor([[1.0, 0.0, 5.0], [0.0, 1.0, 0.0]])
    found = advantages(rewards, spans, mask, credit="turn_returns", turn_discount=0.0)
    torch.testing.assert_close(found, torch.tensor([[0, 0.5, 0.5, 0, 0, 0], [0, -0.5, -0.5, 0, 0.5, 0]]))


GROUPS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(-3, 3), min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=50)
@given(GROUPS, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["turn_returns", "turn_rewards"]))
def test_random_groups_equal_a_loop_over_floats(samples, discount, credit):
    num_turns = max(len(rewards) for _, _, rewards in samples)
    turn_rewards, spans = torch.zeros(len(samples), num_turns), torch.zeros(len(samples), num_turns, 2).long()
    mask = torch.zeros(len(samples), 2 * num_turns + 1)
    for row, (_, _, rewards) in enumerate(samples):
        for turn, reward in enumerate(rewards):
            turn_rewards[row, turn], spans[row, turn] = reward, torch.tensor([2 * turn + 1, 2 * turn + 2])
            mask[row, 2 * turn + 1] = 1
    groups, valid = torch.tensor([s[0] for s in samples]), torch.tensor([float(s[1]) for s in samples])
    found = advantages(turn_rewards, spans, mask, groups=groups, valid=valid, credit=credit, turn_discount=discount)
    expected = by_loops(samples, discount, credit)
    for row, values in enumerate(expected):
        assert found[row, 1::2][: len(values)].tolist() == pytest.approx(values, abs=1e-5)
        assert not found[row, 0::2].any() and not found[row, 1::2][len(values) :].any()


def by_loops(samples, discount, credit):
    """Advantages of each turn of each sample, without normalisation."""

    def total(values, turn):
        return sum(discount**later * value for later, value in enumerate(values[turn:]))

    compared = []
    for _, _, rewards in samples:
        compared.append([total(rewards, n) for n in range(len(rewards))] if credit == "turn_returns" else rewards)
    differences = []
    for (group, is_valid, _), own in zip(samples, compared, strict=True):
        peers = [other for other, sample in zip(compared, samples, strict=True) if sample[0] == group and sample[1]]
        means = [statistics.fmean([p[n] for p in peers if len(p) > n] or [0]) for n in range(len(own))]
        differences.append([(value - mean) * is_valid for value, mean in zip(own, means, strict=True)])
    if credit == "turn_returns":
        return differences
    return [[total(values, n) for n in range(len(values))] for values in differences]


def test_turns_that_were_not_given_are_an_error():
    with pytest.raises(DataError, match="needs turn_rewards"):
        estimator(credit="turn_returns").compute_advantage(None, torch.ones(2), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("grpo", "said"),
    [
        ({"adv_estimator": {"name": "gdpo", "credit": "turn_returns"}}, "only works with grpo.adv_estimator.name=grpo"),
        ({"adv_estimator": {"turn_discount": 0.5}}, "turn_discount=0.5 only works with"),
        (
            {"adv_estimator": {"credit": "turn_rewards"}, "reward_scaling": {"enabled": True}},
            "scale the rewards in the environment",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(grpo, said):
    with pytest.raises(ConfigError, match=said):
        make_advantage_estimator(GRPOConfig.build(**grpo), ClippedPGLossConfig.build())
