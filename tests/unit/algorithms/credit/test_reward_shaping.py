"""Reward scaling and length penalties by hand."""

import pytest
import torch

from nemo_rl.algorithms.credit.reward_shaping import (
    linear_map,
    overlong_penalty,
    scale_rewards,
    shape_rewards,
    stop_properly_penalty,
)
from nemo_rl.algorithms.reward_functions import RewardShapingConfig, apply_reward_shaping
from nemo_rl.config import RewardScalingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

REWARDS = torch.tensor([0.0, 0.25, 1.0])


def shaping(**values):
    defaults = {"enabled": True, "max_response_length": 100, "overlong_buffer_length": 20}
    return RewardShapingConfig.build(**(defaults | values))


def test_linear_map_by_hand():
    assert linear_map(REWARDS, (0.0, 1.0), (-1.0, 1.0)).tolist() == [-1.0, -0.5, 1.0]
    assert linear_map(REWARDS, (0.0, 0.5), (0.0, 10.0)).tolist() == [0.0, 5.0, 10.0]
    assert linear_map(REWARDS, (0.0, 1.0), (1.0, 0.0)).tolist() == [1.0, 0.75, 0.0]


def test_scaling_follows_its_section():
    config = RewardScalingConfig.build(enabled=True, target_min=-1.0)
    assert scale_rewards(REWARDS, config).tolist() == [-1.0, -0.5, 1.0]
    assert scale_rewards(REWARDS, RewardScalingConfig.build()) is REWARDS
    with pytest.raises(ConfigError, match=r"source_min=1 must be below .*source_max=1"):
        scale_rewards(REWARDS, RewardScalingConfig.build(enabled=True, source_min=1.0))


def test_overlong_penalty_ramps():
    lengths = torch.tensor([1, 80, 85, 90, 100, 250])
    up_to_max = [0.0, 0.0, -0.125, -0.25, -0.5]
    assert overlong_penalty(lengths, 100, 20, 0.5).tolist() == [*up_to_max, -0.5 * 170 / 20]
    assert overlong_penalty(lengths, 100, 20, 0.5, limited=True).tolist() == [*up_to_max, -0.5]
    assert overlong_penalty(lengths, 100, 0, 0.5).tolist() == [0, 0, 0, 0, 0, -0.5]
    assert overlong_penalty(lengths, 100, 100, 1.0).tolist()[:3] == [-0.01, -0.8, -0.85]


def test_stop_properly_penalty_touches_truncated_answers_only():
    truncated = torch.tensor([True, False, True])
    assert stop_properly_penalty(REWARDS, truncated, 0.1).tolist() == pytest.approx([0.0, 0.25, 0.1])
    assert stop_properly_penalty(REWARDS, truncated.float(), 0.0).tolist() == [0.0, 0.25, 0.0]
    with pytest.raises(ConfigError, match="stop_properly_penalty_coef"):
        shaping(stop_properly_penalty_coef=1.5)


def test_shaping_follows_its_section():
    lengths, truncated = torch.tensor([50, 90, 100]), torch.tensor([0, 0, 1])
    assert shape_rewards(REWARDS, lengths, truncated, shaping(enabled=False)) is REWARDS
    ramp = shape_rewards(REWARDS, lengths, truncated, shaping(overlong_buffer_penalty=0.4))
    assert ramp.tolist() == pytest.approx([0.0, 0.05, 0.6])
    assert ramp.dtype == REWARDS.dtype
    stop = shape_rewards(REWARDS, lengths, truncated, shaping(stop_properly_penalty_coef=0.5))
    assert stop.tolist() == [0.0, 0.25, 0.5]
    far, none = torch.full((3,), 140), torch.zeros(3)
    assert shape_rewards(REWARDS, far, none, shaping()).tolist() == pytest.approx([-3.0, -2.75, -2.0])
    limited = shape_rewards(REWARDS, far, none, shaping(limit_overlong_penalty=True))
    assert limited.tolist() == pytest.approx([-1.0, -0.75, 0.0])
    with pytest.raises(ConfigError, match="needs a value for overlong_buffer_penalty"):
        shape_rewards(REWARDS, lengths, truncated, shaping(overlong_buffer_penalty=None))
    # A buffer of 120 tokens before 100: an answer of n tokens is n + 20 tokens into it.
    longer = shape_rewards(REWARDS, lengths, truncated, shaping(overlong_buffer_length=120))
    assert longer.tolist() == pytest.approx([0 - 70 / 120, 0.25 - 110 / 120, 1 - 120 / 120])


def test_batches_are_shaped_by_their_generated_tokens():
    def log(*lengths):
        turns = [{"role": "user", "token_ids": torch.zeros(500)}]
        return turns + [{"role": "assistant", "token_ids": torch.zeros(n)} for n in lengths]

    batch = BatchedDataDict(
        {"total_reward": REWARDS, "message_log": [log(50), log(40, 50), log(99, 1)], "idx": [0, 1, 2]}
    )
    shaped = apply_reward_shaping(batch, shaping(overlong_buffer_penalty=0.4))
    assert isinstance(shaped, BatchedDataDict)
    assert shaped["total_reward"].tolist() == pytest.approx([0.0, 0.05, 0.6])
    assert shaped["idx"] == [0, 1, 2]
    assert batch["total_reward"] is REWARDS
    batch["truncated"] = torch.tensor([False, False, True])
    stopped = apply_reward_shaping(batch, shaping(stop_properly_penalty_coef=0.0))
    assert stopped["total_reward"].tolist() == [0.0, 0.25, 0.0]
