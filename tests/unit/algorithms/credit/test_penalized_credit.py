"""Penalties, budgets of effort and fixed advantages, from trajectories to advantages, against numbers by hand."""

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.reward_shaping import effort_penalty
from nemo_rl.algorithms.credit.turns import set_malformed_thinking
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.rollout.source import DynamicSampling, Group
from nemo_rl.config import ClippedPGLossConfig, EffortLevelConfig, GRPOConfig
from nemo_rl.experience.trajectory import Trajectory

pytestmark = pytest.mark.fast

PLAIN = {"use_leave_one_out_baseline": False, "normalize_rewards": False}
LEVELS = {
    "low": EffortLevelConfig(max_thinking_tokens=10, over_budget_penalty=0.5),
    "middle": EffortLevelConfig(max_thinking_tokens=10, over_budget_penalty=2.0, over_budget_tokens=5),
    "high": EffortLevelConfig(),
}


def trajectory(sample_index, *turn_rewards, offending=None, components=None, **keys):
    """Make a sample whose turns have 2 tokens each, after a prompt and between observations of 1 token."""
    log = []
    for _ in turn_rewards:
        log += [
            {"role": "user", "content": "", "token_ids": torch.tensor([5])},
            {
                "role": "assistant",
                "content": "",
                "token_ids": torch.tensor([6, 7]),
                "generation_logprobs": torch.zeros(2),
            },
        ]
    return Trajectory(
        *(0, sample_index, 0, "math", log, 1),
        reward=sum(turn_rewards),
        turn_rewards=list(turn_rewards),
        reward_components=components or {},
        penalties={} if offending is None else {"empty_final_answer": offending},
        **keys,
    )


def assign(trajectories, levels=None, **grpo):
    config = GRPOConfig.build(**(PLAIN | grpo))
    batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=False)
    credit = CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config, levels)
    return batch, credit.assign(batch, trajectories)


def test_a_penalised_sample_competes_with_a_reward_of_zero_and_stays_in_the_loss():
    samples = [trajectory(0, 1.0), trajectory(1, 1.0, offending=[0]), trajectory(2, -2.0, offending=[0])]
    batch, metrics = assign(samples)
    assert batch["advantages"][:, 1].tolist() == pytest.approx([4 / 3, 1 / 3, -5 / 3])  # of 1, 0 and -2
    assert metrics["filtered_reward"] == pytest.approx(-1 / 3)
    assert batch["sample_mask"].tolist() == [1.0, 1.0, 1.0]
    assert batch["positive_examples"].tolist() == [1.0, 0.0, 0.0]
    assert [sample.reward for sample in samples] == [1.0, 1.0, -2.0]


def test_zero_is_a_reward_of_the_environment_before_scaling():
    scaling = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": -1.0, "target_max": 1.0}
    batch, _ = assign([trajectory(0, 1.0), trajectory(1, 1.0, offending=[0])], reward_scaling=scaling)
    assert batch["advantages"][:, 1].tolist() == pytest.approx([1.0, -1.0])  # of 1 and -1


def test_gdpo_penalises_each_component_but_no_negative_one():
    right, wrong = {"right": 1.0, "form": -0.5}, {"right": 0.0, "form": -1.0}
    samples = [trajectory(0, 0.5, components=right), trajectory(1, 0.5, components=right, offending=[0])]
    samples += [trajectory(2, -1.0, components=wrong, offending=[0])]
    batch, _ = assign(samples, adv_estimator={"name": "gdpo"})
    sums = torch.tensor([1 - 1 / 3 + (-0.5 + 2 / 3), -1 / 3 + (-0.5 + 2 / 3), -1 / 3 + (-1 + 2 / 3)])
    assert batch["advantages"][:, 1].tolist() == pytest.approx((sums / (sums.std() + 1e-6)).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # Turn rewards (1, 1, 1) and (1, 1, 1 - 3): returns (3, 2, 1) and (0, -1, -2).
        ("turn_returns", [[1.5, 1.5, 1.5], [-1.5, -1.5, -1.5]]),
        ("turn_rewards", [[1.5, 1.5, 1.5], [-1.5, -1.5, -1.5]]),
    ],
)
def test_with_credit_per_turn_the_offending_turn_pays(credit, expected):
    samples = [trajectory(0, 1.0, 1.0, 1.0), trajectory(1, 1.0, 1.0, 1.0, offending=[2])]
    batch, _ = assign(samples, adv_estimator={"name": "dr_grpo", "credit": credit})
    for row, values in zip(batch["advantages"][:, [1, 4, 7]].tolist(), expected, strict=True):
        assert row == pytest.approx(values)


def test_turns_after_the_offending_one_lose_nothing():
    """Turn rewards (1, 1) and (1 - 2, 1): returns (2, 1) and (0, 1)."""
    samples = [trajectory(0, 1.0, 1.0), trajectory(1, 1.0, 1.0, offending=[0])]
    batch, _ = assign(samples, adv_estimator={"name": "dr_grpo", "credit": "turn_returns"})
    assert batch["advantages"][:, 1].tolist() == pytest.approx([1.0, -1.0])
    assert batch["advantages"][:, 4].tolist() == pytest.approx([0.0, 0.0])


def test_thinking_beyond_the_budget_costs_linearly_and_at_most_the_penalty():
    def thought(level, *numbers):
        return effort_penalty([trajectory(0, 1.0, effort=level, num_thinking_tokens=n) for n in numbers], LEVELS)

    assert thought("low", 0, 10, 12, 20, 90).tolist() == pytest.approx([0.0, 0.0, -0.1, -0.5, -0.5])
    assert thought("middle", 10, 11, 15, 16).tolist() == pytest.approx([0.0, -0.4, -2.0, -2.0])
    assert thought("high", 9000).tolist() == thought(None, 9000).tolist() == [0.0]


def test_the_penalty_of_a_level_lowers_the_reward_of_its_own_samples_only():
    samples = [
        trajectory(0, 1.0, effort="low", num_thinking_tokens=15),
        trajectory(1, 1.0, effort="low", num_thinking_tokens=5),
        trajectory(2, 1.0, effort="high", num_thinking_tokens=90),
        trajectory(3, 1.0, effort="low", num_thinking_tokens=90, offending=[0]),
    ]
    batch, metrics = assign(samples, LEVELS)
    rewards = [0.75, 1.0, 1.0, -0.5]
    assert batch["advantages"][:, 1].tolist() == pytest.approx([reward - 2.25 / 4 for reward in rewards])
    assert metrics["effort/low/over_budget_penalty"] == pytest.approx(0.75 / 3)
    assert "effort/high/over_budget_penalty" not in metrics


def test_a_tag_out_of_place_gets_its_own_advantage_and_no_other_token_does():
    samples = [trajectory(0, 1.0, 1.0, malformed_thinking=[(1, 2), (4, 5)]), trajectory(1, 0.0)]
    batch, _ = assign(samples, malformed_thinking_advantage=-5.0)
    assert batch["advantages"][0].tolist() == pytest.approx([0.0, -5.0, 1.0, 0.0, -5.0, 1.0])
    assert batch["advantages"][1].tolist() == pytest.approx([0.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    untouched, _ = assign(samples)
    assert untouched["advantages"][0].tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])


def test_a_tag_in_a_sample_that_does_not_count_keeps_an_advantage_of_zero():
    advantages, mask = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
    set_malformed_thinking(advantages, mask, [trajectory(0, 1.0, malformed_thinking=[(1, 3)])], -5.0)
    assert advantages.tolist() == [[0.0, 0.0, -5.0]]


def test_dynamic_sampling_keeps_a_group_whose_rewards_differ_by_a_penalty_only():
    class Rounds:
        metrics, max_staleness = {}, 0

        def next_groups(self, step):
            yield Group((0, 0), [trajectory(0, 1.0), trajectory(1, 1.0)])
            yield Group((0, 1), [trajectory(0, 1.0), trajectory(1, 1.0, offending=[0])])
            yield Group((0, 2), [trajectory(0, 0.0), trajectory(1, -1.0, offending=[0])])

    groups = list(DynamicSampling(Rounds(), num_groups=2, max_rounds=1).next_groups(1))
    assert [group.trains for group in groups] == [False, True, True]
