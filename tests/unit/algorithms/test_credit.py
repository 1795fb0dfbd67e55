"""From trajectories to advantages: what scaling and shaping touch."""

import statistics

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.assignment import CreditAssignment
from nemo_rl.algorithms.rollout.training_batch import build_training_batch
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.experience.trajectory import Trajectory

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
    """Points of 80 and 65 are both cut to 50, hence equal, before anything is compared."""
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
