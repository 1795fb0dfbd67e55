"""From trajectories to advantages: what scaling and shaping touch, and which samples enter which statistic."""

import logging
import math
import statistics

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.experience.trajectory import Outcome, Trajectory

pytestmark = pytest.mark.fast

REWARDS = [{"right": 1.0, "points": 80.0}, {"right": 0.0, "points": 20.0}, {"right": 0.0, "points": 65.0}]
SCALING = {"enabled": True, "source_min": 0.0, "source_max": 50.0, "target_min": -1.0, "target_max": 1.0}


def trajectory(sample_index, components):
    log = [
        {"role": "user", "content": "", "token_ids": torch.tensor([5])},
        {"role": "assistant", "content": "", "token_ids": torch.tensor([6, 7]), "generation_logprobs": torch.zeros(2)},
    ]
    total = sum(components.values())
    return Trajectory(0, sample_index, 0, "math", log, 1, reward=total, reward_components=components)


def assign(**grpo):
    config = GRPOConfig.build(use_leave_one_out_baseline=False, **grpo)
    trajectories = [trajectory(i, components) for i, components in enumerate(REWARDS)]
    batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=False)
    credit = CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config)
    metrics = credit.assign(batch, trajectories)
    return batch["advantages"][:, 1].tolist(), metrics


def test_gdpo_scales_each_component():
    """Points of 80 and 65 are both cut to 50, so they are equal, before anything is compared."""
    advantages, _ = assign(adv_estimator={"name": "gdpo", "normalize_rewards": False}, reward_scaling=SCALING)
    right, points = [-1 + 2 / 50, -1.0, -1.0], [1.0, -1 + 40 / 50, 1.0]
    summed = [r - statistics.fmean(right) + p - statistics.fmean(points) for r, p in zip(right, points, strict=True)]
    std = statistics.stdev(summed) + 1e-6
    assert advantages == pytest.approx([s / std for s in summed], rel=1e-5)


def test_other_estimators_scale_the_total():
    advantages, metrics = assign(normalize_rewards=False, reward_scaling=SCALING)
    totals = [1.0, -1 + 40 / 50, 1.0]
    assert advantages == pytest.approx([t - statistics.fmean(totals) for t in totals], rel=1e-5)
    assert metrics["filtered_reward"] == pytest.approx(statistics.fmean(totals))


def credited(estimator, mask_truncated=True, **grpo):
    """Advantages of a prompt's four answers: rewards 1, 0 and 3 (cut off), and one that could not be graded."""
    rewards = [1.0, 0.0, 3.0, None]
    trajectories = [trajectory(i, {"all": reward or 0.0}) for i, reward in enumerate(rewards)]
    trajectories[2].outcome = Outcome.TRUNCATED
    trajectories[3].outcome, trajectories[3].reward = Outcome.REWARD_ERROR, None
    batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=mask_truncated)
    config = GRPOConfig.build(adv_estimator=estimator, **grpo)
    credit = CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config)
    metrics = credit.assign(batch, trajectories)
    assert batch["positive_examples"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert not batch["advantages"][2 if mask_truncated else 3].any()
    return batch["advantages"][:, 1].tolist(), metrics


def test_an_answer_that_the_loss_leaves_out_stays_in_the_baseline():
    """GRPO's mean of 1, 0 and 3 is 4/3, its deviation root(7/3); the answer without a reward is in neither."""
    advantages, metrics = credited({"use_leave_one_out_baseline": False})
    std = math.sqrt(((1 - 4 / 3) ** 2 + (4 / 3) ** 2 + (3 - 4 / 3) ** 2) / 2)
    assert advantages == pytest.approx([(1 - 4 / 3) / (std + 1e-6), (0 - 4 / 3) / (std + 1e-6), 0.0, 0.0])
    assert metrics["filtered_reward"] == pytest.approx((1 + 0) / 2)
    assert metrics["advantages/min"] == pytest.approx(advantages[1])


def test_an_advantage_out_of_almost_equal_rewards_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without the right answer the other seven rewards differ by 1e-4, which divides its distance from their mean."""
    rewards = [1.004, *(0.0035 + 1e-4 * (i % 3) for i in range(7))]
    trajectories = [trajectory(i, {"all": reward}) for i, reward in enumerate(rewards)]
    others = rewards[1:]
    expected = (rewards[0] - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)
    assert expected > 5000
    for grpo, number in (({}, 1), ({"use_leave_one_out_baseline": False}, 0)):
        config = GRPOConfig.build(**grpo)
        credit = CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config)
        caplog.clear()
        for _ in range(2):
            batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=False)
            with caplog.at_level(logging.WARNING):
                credit.assign(batch, trajectories)
        told = [record.getMessage() for record in caplog.records if "outweighs" in record.getMessage()]
        assert len(told) == number
        if number:
            assert batch["advantages"][0, 1] == pytest.approx(expected, rel=1e-3)
            assert f"{float(batch['advantages'][0, 1]):.4g}" in told[0]


def test_leave_one_out_baselines_are_of_all_other_answers_with_a_reward():
    """The others of 1 are 0 and 3: mean 1.5, deviation 1.5 root(2); those of 0 are 1 and 3: 2 and root(2)."""
    advantages, _ = credited({"use_leave_one_out_baseline": True})
    assert advantages == pytest.approx(
        [(1 - 1.5) / (1.5 * math.sqrt(2) + 1e-6), (0 - 2) / (math.sqrt(2) + 1e-6), 0.0, 0.0]
    )
    rloo, _ = credited({"name": "rloo"})
    assert rloo == pytest.approx([1 - 1.5, 0 - 2.0, 0.0, 0.0])


def test_gdpo_whitens_over_all_answers_with_a_reward():
    """One component without normalisation: 1, 0 and 3 less 4/3, whitened over the three."""
    advantages, _ = credited({"name": "gdpo", "normalize_rewards": False, "use_leave_one_out_baseline": False})
    centred = [1 - 4 / 3, -4 / 3, 3 - 4 / 3]
    std = statistics.stdev(centred)
    assert advantages == pytest.approx([centred[0] / (std + 1e-6), centred[1] / (std + 1e-6), 0.0, 0.0], rel=1e-5)


def test_reinforce_plus_plus_subtracts_the_whole_baseline_and_whitens_what_is_trained_on():
    """Less 4/3, the tokens of the two answers in the loss are -1/3 and -4/3: mean -5/6, deviation 1/2."""
    advantages, _ = credited({"name": "reinforce_plus_plus"})
    assert advantages == pytest.approx([1.0, -1.0, 0.0, 0.0])
    everything, _ = credited({"name": "reinforce_plus_plus"}, mask_truncated=False)
    centred = [1 - 4 / 3, -4 / 3, 3 - 4 / 3]
    assert everything == pytest.approx([value / statistics.pstdev(centred) for value in centred] + [0.0])
    plain, _ = credited({"name": "reinforce_plus_plus", "minus_baseline": False})
    assert plain == pytest.approx([1.0, -1.0, 0.0, 0.0])  # 1 and 0: mean 1/2, deviation 1/2


def test_shaping_with_gdpo_changes_the_total_alone(caplog):
    shaping = {"enabled": True, "max_response_length": 2, "overlong_buffer_length": 1, "overlong_buffer_penalty": 0.5}
    estimator = {"name": "gdpo", "normalize_rewards": False}
    plain, metrics = assign(adv_estimator=estimator)
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        shaped, with_penalty = assign(adv_estimator=estimator, reward_shaping=shaping)
    assert shaped == plain
    assert with_penalty["filtered_reward"] == pytest.approx(metrics["filtered_reward"] - 0.5)
    assert len(caplog.messages) == 1 and "which it leaves as they are" in caplog.messages[0]


def test_the_mean_of_weighted_rewards_divides_by_their_weights():
    trajectories = [trajectory(i, {"all": reward}) for i, reward in enumerate((1.0, 0.0))]
    for weighted in trajectories:
        weighted.loss_multiplier = 0.25
    batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=False)
    config = GRPOConfig.build()
    credit = CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config)
    assert credit.assign(batch, trajectories)["filtered_reward"] == pytest.approx(0.5)


class RecordingEstimator:
    """Keeps what it was given."""

    needs_logprobs = False

    def compute_advantage(self, prompt_ids, rewards, mask, **extras):
        self.extras = extras
        return torch.zeros_like(mask)


def conversation(*turn_lengths, rewards, prompt_length=2):
    """Turns of the policy, each followed by two tokens of the environment but for the last."""
    log = [{"role": "user", "content": "", "token_ids": torch.zeros(prompt_length, dtype=torch.int64)}]
    for turn, length in enumerate(turn_lengths):
        ids = torch.ones(length, dtype=torch.int64)
        log.append({"role": "assistant", "content": "", "token_ids": ids, "generation_logprobs": torch.zeros(length)})
        if turn < len(turn_lengths) - 1:
            log.append({"role": "environment", "content": "", "token_ids": torch.zeros(2, dtype=torch.int64)})
    total = sum(rewards) if rewards else None
    return Trajectory(0, 0, 0, "math", log, prompt_length, reward=total, turn_rewards=list(rewards))


def test_an_estimator_gets_the_reward_and_the_tokens_of_each_turn():
    trajectories = [
        conversation(3, 1, 2, rewards=[1.0, 0.0, 4.0]),
        conversation(2, rewards=[2.0]),
        conversation(rewards=[]),
    ]
    batch = build_training_batch(trajectories, pad_token_id=9, mask_truncated=False)
    estimator = RecordingEstimator()
    CreditAssignment(estimator, GRPOConfig.build()).assign(batch, trajectories)
    rewards, spans = estimator.extras["turn_rewards"], estimator.extras["turn_spans"]
    assert rewards.tolist() == [[1, 0, 4], [2, 0, 0], [0, 0, 0]]
    assert spans.tolist() == [[[2, 5], [7, 8], [10, 12]], [[2, 4], [0, 0], [0, 0]], [[0, 0]] * 3]
    written = torch.zeros_like(batch["token_mask"])
    for row, turns in enumerate(spans.tolist()):
        for first, end in turns:
            written[row, first:end] = 1
    assert torch.equal(written, batch["token_mask"]), "the spans are the tokens that the policy wrote"
    assert rewards.dtype == torch.float64 and spans.dtype == torch.int64
    assert estimator.extras["total_rewards"].dtype == torch.float64


def test_turn_rewards_of_samples_without_turns_are_empty():
    trajectories = [conversation(rewards=[])]
    batch = build_training_batch(trajectories, pad_token_id=9, mask_truncated=False)
    estimator = RecordingEstimator()
    CreditAssignment(estimator, GRPOConfig.build()).assign(batch, trajectories)
    assert estimator.extras["turn_rewards"].shape == (1, 0)
    assert estimator.extras["turn_spans"].shape == (1, 0, 2)


def test_turn_rewards_change_no_built_in_advantage():
    """One turn or several: a built-in estimator reads the sum alone."""
    config = GRPOConfig.build()
    advantages = []
    for rewards in ([[1.0, 2.0], [0.5, 0.0]], [[3.0], [0.5]]):
        trajectories = [conversation(2, 2, rewards=earned) for earned in rewards]
        for number, trajectory_ in enumerate(trajectories):
            trajectory_.sample_index = number
        batch = build_training_batch(trajectories, pad_token_id=0, mask_truncated=False)
        CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config).assign(
            batch, trajectories
        )
        advantages.append(batch["advantages"])
    assert torch.equal(*advantages)
