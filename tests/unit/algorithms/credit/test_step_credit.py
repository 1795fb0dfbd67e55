"""Rewards of steps of an answer, at their tokens: numbers by hand, in float64."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.token_credit import TokenCredit
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import REPOSITORY_ROOT, ClippedPGLossConfig, GRPOConfig, GRPOMasterConfig, PPOConfig, load_config
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

LOSS = ClippedPGLossConfig.build()


def message(role: str, length: int) -> dict[str, Any]:
    written = {"generation_logprobs": -torch.ones(length)} if role == "assistant" else {}
    return {"role": role, "content": "", "token_ids": torch.ones(length, dtype=torch.int64), **written}


def answer(num_tokens: int, *steps: tuple[int, float], reward: float | None = None, group: int = 0) -> Trajectory:
    """An answer to a prompt of two tokens, whose reward is the sum of its steps if no other is given."""
    total = sum(value for _, value in steps) if reward is None else reward
    log = [message("user", 2), message("assistant", num_tokens)]
    one = Trajectory(group, 0, 0, "math", log, 2, reward=total, turn_rewards=[total])
    one.step_rewards = [list(steps)]
    return one


def of_tokens(samples: list[Trajectory], tensors: Any, name: str) -> list[list[float]]:
    return [row[mask > 0].tolist() for row, mask in zip(tensors[name], tensors["token_mask"], strict=True)]


def grpo_advantages(samples: list[Trajectory], **estimator: Any) -> list[list[float]]:
    options = {"name": "grpo", "credit": "step_rewards", "use_leave_one_out_baseline": False}
    config = GRPOConfig.build(adv_estimator=options | estimator)
    tensors = build_training_batch(samples, pad_token_id=0, mask_truncated=False)
    CreditAssignment(make_advantage_estimator(config, LOSS), config).assign(tensors, samples)
    return of_tokens(samples, tensors, "advantages")


GROUP = (
    answer(3, (1, 0.9), (2, 0.3)),  # the last step ends with the turn, as the end-of-sequence token belongs to it
    answer(2, (2, 0.6)),
    answer(3, (1, 0.0), (2, 0.9), (3, 0.3)),
)


def test_grpo_compares_all_steps_of_the_group_and_sums_what_follows() -> None:
    """DeepSeekMath, section 4.1.3: the mean of 0.9, 0.3, 0.6, 0, 0.9 and 0.3 is 0.5, the sum of squares 0.66."""
    std = math.sqrt(0.66 / 5)
    want = [[0.2, -0.2, -0.2], [0.1, 0.1], [-0.3, 0.2, -0.2]]
    for found, expected in zip(grpo_advantages([*GROUP]), want, strict=True):
        assert found == pytest.approx([value / (std + 1e-6) for value in expected], rel=1e-5)


def test_another_group_does_not_change_the_statistics() -> None:
    other = answer(2, (1, 5.0), (2, 7.0), group=1)
    *found, alone = grpo_advantages([*GROUP, other])
    assert found == grpo_advantages([*GROUP])
    std = math.sqrt(2.0)
    assert alone == pytest.approx([(-1 + 1) / std, 1 / std], abs=1e-5)


def test_dr_grpo_subtracts_the_mean_only_and_a_discount_reduces_later_steps() -> None:
    found = grpo_advantages([*GROUP], name="dr_grpo", turn_discount=0.5)
    want = [[0.4 - 0.1, -0.2, -0.2], [0.1, 0.1], [-0.5 + 0.2 - 0.05, 0.4 - 0.1, -0.2]]
    for one, expected in zip(found, want, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)


def test_an_answer_without_steps_is_one_step_and_one_without_a_reward_is_none() -> None:
    whole, failed = answer(2, reward=0.5), answer(2, (1, 0.5), (2, 0.5))
    failed.fail("no reward")
    found = grpo_advantages([answer(2, (1, 0.2), (2, 0.2)), whole, failed], name="dr_grpo")
    mean = (0.2 + 0.2 + 0.5) / 3
    assert found[0] == pytest.approx([2 * (0.2 - mean), 0.2 - mean], rel=1e-5)
    assert found[1] == pytest.approx([0.5 - mean] * 2, rel=1e-5)
    assert found[2] == [0.0, 0.0]


def test_samples_without_any_step_are_refused() -> None:
    with pytest.raises(DataError, match="no sample of this step of training has any.*step_reward=each"):
        grpo_advantages([answer(2, reward=1.0), answer(2, reward=0.0)])


def ppo_rewards(one: Trajectory, **ppo: Any) -> list[float]:
    """The rewards of the tokens: with gamma 0 and values of 0 a return is the token's own reward."""
    tensors = build_training_batch([one], pad_token_id=0, mask_truncated=False)
    tensors["values"] = torch.zeros(tensors["token_mask"].shape)
    config = PPOConfig.build(adv_estimator={"gae_gamma": 0.0, "normalize_advantages": False}, **ppo)
    TokenCredit(config, LOSS).apply(StepBatch(tensors, [one]))
    return of_tokens([one], tensors, "returns")[0]


def test_ppo_has_the_reward_of_a_step_at_its_last_token() -> None:
    assert ppo_rewards(answer(5, (2, 0.5), (4, 0.25))) == [0.0, 0.5, 0.0, 0.0, 0.25]


def test_ppo_gives_the_rest_of_the_reward_to_the_last_token() -> None:
    assert ppo_rewards(answer(4, (1, 0.5), (3, 0.25), reward=1.0)) == [0.5, 0.0, 0.0, 0.5]


def test_gae_of_two_steps_by_hand() -> None:
    """Three tokens with rewards 0.5, 0 and 0.25 and values 0.4, 0.2 and 0.1; gamma 1, lambda 0.5."""
    one = answer(3, (1, 0.5), (3, 0.25))
    tensors = build_training_batch([one], pad_token_id=0, mask_truncated=False)
    tensors["values"] = torch.zeros(tensors["token_mask"].shape)
    tensors["values"][tensors["token_mask"] > 0] = torch.tensor([0.4, 0.2, 0.1])
    estimator = {"gae_gamma": 1.0, "gae_lambda": 0.5, "normalize_advantages": False}
    TokenCredit(PPOConfig.build(adv_estimator=estimator), LOSS).apply(StepBatch(tensors, [one]))
    last = 0.25 - 0.1
    middle = 0.0 + 0.1 - 0.2 + 0.5 * last
    first = 0.5 + 0.2 - 0.4 + 0.5 * middle
    assert of_tokens([one], tensors, "advantages")[0] == pytest.approx([first, middle, last], abs=1e-7)


def test_scaling_changes_the_rewards_of_steps_by_its_slope() -> None:
    scaling = {"enabled": True, "target_min": -1.0, "target_max": 1.0}
    assert ppo_rewards(answer(3, (1, 0.25), (3, 0.25)), reward_scaling=scaling) == [0.5, 0.0, 0.5 - 1.0]


def test_steps_of_several_turns_and_a_penalty() -> None:
    """The first turn has steps, the second none. A penalty takes the reward from the second turn, which offends."""
    log = [message("user", 2), message("assistant", 2), message("user", 1), message("assistant", 2)]
    one = Trajectory(0, 0, 0, "math", log, 2, reward=1.0, turn_rewards=[0.75, 0.25])
    one.step_rewards = [[(1, 0.5), (2, 0.25)], []]
    assert one.rewarded_spans == [((2, 3), 0.5), ((3, 4), 0.25), ((5, 7), 0.25)]
    one.penalties = {"empty": [1]}
    assert one.rewarded_spans == [((2, 3), 0.5), ((3, 4), 0.25), ((5, 7), -0.75)]
    one.penalties = {"empty": [0]}
    assert one.rewarded_spans == [((2, 3), 0.5), ((3, 4), -0.75), ((5, 7), 0.25)]


def test_steps_that_end_with_one_token_are_one_step() -> None:
    assert answer(3, (1, 0.5), (1, 0.25), (2, 0.125)).rewarded_spans == [((2, 3), 0.75), ((3, 5), 0.125)]


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [
        ({"name": "grpo"}, "compares each step with all steps of the group.*use_leave_one_out_baseline=false"),
        ({"name": "rloo"}, "compares each step with all steps of the group"),
        ({"name": "gdpo"}, "only works with grpo.adv_estimator.name=grpo, dr_grpo, rloo"),
    ],
)
def test_estimators_that_cannot_compare_steps_are_refused(estimator: dict[str, Any], reason: str) -> None:
    config = GRPOConfig.build(adv_estimator={"credit": "step_rewards", **estimator})
    with pytest.raises(ConfigError, match=reason):
        make_advantage_estimator(config, LOSS)


def test_a_run_whose_environments_give_no_rewards_of_steps_is_refused() -> None:
    config = REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml"
    keys = ["grpo.adv_estimator.credit=step_rewards", "grpo.use_leave_one_out_baseline=false"]
    with pytest.raises(ConfigError, match="no environment of the data gives rewards of steps"):
        load_config(config, keys, GRPOMasterConfig)
