"""From rewards and a critic's values to advantages and returns of tokens: by hand, and by a plain reference."""

import math
import statistics
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.advantage_estimator import GeneralizedAdvantageEstimator, RawRewardAdvantageEstimator
from nemo_rl.algorithms.credit.token_credit import TokenCredit
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import ClippedPGLossConfig, PPOConfig
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.trajectory import Outcome, Trajectory

pytestmark = pytest.mark.fast

RAW = {"normalize_advantages": False}
KL = ClippedPGLossConfig.build(
    use_kl_in_reward=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1", kl_output_clamp_value=None
)


def messages(*lengths: int) -> list[dict[str, Any]]:
    """Messages of these numbers of tokens, in turn of the user and of the policy."""
    return [
        {
            "role": "assistant" if number % 2 else "user",
            "content": "",
            "token_ids": torch.ones(length, dtype=torch.int64),
            **({"generation_logprobs": -torch.ones(length)} if number % 2 else {}),
        }
        for number, length in enumerate(lengths)
    ]


def sample(
    reward: float | None, *conversations: list[dict[str, Any]], outcome: Outcome = Outcome.FINISHED
) -> Trajectory:
    branches = [Branch(log, log[0]["token_ids"].numel()) for log in conversations[1:]]
    log = conversations[0]
    return Trajectory(
        0, 0, 0, "math", log, log[0]["token_ids"].numel(), reward=reward, outcome=outcome, branches=branches
    )


def credited(
    samples: list[Trajectory],
    values: list[list[float]] | None = None,
    loss: ClippedPGLossConfig | None = None,
    mask_truncated: bool = False,
    **ppo: Any,
) -> tuple[StepBatch, dict[str, float]]:
    """Apply the stage to samples; `values` are those of the written tokens of each row, 0 if left out."""
    tensors = build_training_batch(samples, pad_token_id=0, mask_truncated=mask_truncated)
    tensors["values"] = torch.full(tensors["token_mask"].shape, 9.0)  # of prompts, observations and padding
    for row, of_row in enumerate(values or [[0.0] * int(n) for n in tensors["token_mask"].sum(1)]):
        tensors["values"][row, tensors["token_mask"][row] > 0] = torch.tensor(of_row)
    tensors["values_after"] = torch.tensor([0.75] * tensors.size)
    loss = loss or ClippedPGLossConfig.build()
    if loss.use_kl_in_reward:
        width = tensors["token_mask"].shape[1]
        tensors["prev_logprobs"] = -torch.arange(1.0, width + 1).expand_as(tensors["token_mask"]) / 10
        tensors["reference_policy_logprobs"] = torch.full_like(tensors["token_mask"], -1.0)
    batch = StepBatch(tensors, samples)
    return batch, TokenCredit(PPOConfig.build(**ppo), loss).apply(batch)


def of_tokens(batch: StepBatch, name: str) -> list[list[float]]:
    """The values of the written tokens of each row."""
    return [
        values[mask > 0].tolist() for values, mask in zip(batch.tensors[name], batch.tensors["token_mask"], strict=True)
    ]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_advantages_and_returns_by_hand() -> None:
    """Two tokens with values 0.5 and 0.25 and a reward of 1; lambda 0.5 for the policy and 1 for the critic."""
    options = {"gae_lambda_policy": 0.5, "gae_lambda_value": 1.0, **RAW}
    batch, metrics = credited([sample(1.0, messages(3, 2))], [[0.5, 0.25]], adv_estimator=options)
    assert of_tokens(batch, "advantages") == [[-0.25 + 0.5 * 0.75, 0.75]]
    assert of_tokens(batch, "returns") == [[1.0, 1.0]]
    assert batch.tensors["advantages"][0, :3].tolist() == batch.tensors["returns"][0, :3].tolist() == [0.0] * 3
    assert metrics["returns_mean"] == 1.0
    assert (metrics["values_min"], metrics["values_mean"], metrics["values_max"]) == (0.25, 0.375, 0.5)
    assert metrics["filtered_reward"] == 1.0 and metrics["advantages/max"] == 0.75


def test_an_observation_is_no_step() -> None:
    turns, together = (
        credited([sample(1.0, messages(*n))], [[0.5, 0.25, 0.1]], adv_estimator=RAW) for n in ((3, 2, 4, 1), (3, 3))
    )
    for name in ("advantages", "returns"):
        assert of_tokens(turns[0], name) == of_tokens(together[0], name)
    assert turns[1] == together[1]


def turn_rewards_at_tokens(one: Trajectory, turn_rewards: list[float], **ppo: Any) -> list[float]:
    """The rewards of the tokens: with gamma 0 and values of 0 an advantage is the token's own reward."""
    one.turn_rewards = turn_rewards
    batch, _ = credited([one], adv_estimator={"gae_gamma": 0.0, **RAW}, **ppo)
    return flat(of_tokens(batch, "returns"))


@pytest.mark.parametrize(
    ("reward", "turn_rewards", "want"),
    [
        (1.75, [0.25, 0.5, 1.0], [0.0, 0.25, 0.5, 0.0, 1.0]),
        (1.75, [0.25, 0.5], [0.0, 0.25, 0.5, 0.0, 1.0]),
        (1.75, [], [0.0, 0.0, 0.0, 0.0, 1.75]),
    ],
    ids=["each", "not of the last turn", "of the sample only"],
)
def test_the_reward_of_a_turn_is_at_its_last_token(reward: float, turn_rewards: list[float], want: list[float]) -> None:
    """Three turns of 2, 1 and 2 tokens; what the turns do not have is at the last token."""
    assert turn_rewards_at_tokens(sample(reward, messages(3, 2, 4, 1, 1, 2)), turn_rewards) == want


def test_turns_of_all_conversations_have_their_rewards() -> None:
    """The second conversation does not train: its reward is at the last token of the sample."""
    one = sample(0.875, messages(1, 2, 1, 1), messages(1, 2), messages(2, 1))
    one.branches[0].trains = False
    found = turn_rewards_at_tokens(one, [0.125, 0.0, 0.25, 0.5])
    assert found == [0.0, 0.125, 0.0, 0.0, 0.0, 0.75]


def test_scaled_and_shaped_rewards_of_turns_sum_to_that_of_the_sample() -> None:
    """0 to 1 becomes -1 to 1: a turn's reward counts twice, and the last token pays the shift and the penalty."""
    scaling = {"enabled": True, "target_min": -1.0, "target_max": 1.0}
    shaping = {"enabled": True, "max_response_length": 3, "overlong_buffer_length": 0, "overlong_buffer_penalty": 0.5}
    one = sample(0.75, messages(1, 2, 1, 2))
    found = turn_rewards_at_tokens(one, [0.25, 0.5], reward_scaling=scaling, reward_shaping=shaping)
    assert found == [0.0, 0.5, 0.0, 0.5 - 0.5 - 0.5]
    assert sum(found) == 2 * 0.75 - 1 - 0.5


def test_the_value_after_a_turn_follows_its_reward() -> None:
    """Turns of one token with rewards 1 and 2 and values 0.5 and 0.25: lambda 0 takes one step only."""
    one = sample(3.0, messages(1, 1, 5, 1))
    one.turn_rewards = [1.0, 2.0]
    batch, _ = credited([one], [[0.5, 0.25]], adv_estimator={"gae_lambda": 0.0, **RAW})
    assert of_tokens(batch, "advantages") == [[1.0 + 0.25 - 0.5, 2.0 - 0.25]]


def test_conversations_of_a_sample_are_one_sequence() -> None:
    """The reward of the sample is at the last token of its last conversation."""
    apart, _ = credited([sample(1.0, messages(3, 2), messages(2, 1))], [[0.5, 0.25], [0.1]], adv_estimator=RAW)
    together, _ = credited([sample(1.0, messages(3, 3))], [[0.5, 0.25, 0.1]], adv_estimator=RAW)
    for name in ("advantages", "returns"):
        assert flat(of_tokens(apart, name)) == flat(of_tokens(together, name))


def test_the_kl_penalty_is_in_the_reward_of_each_token() -> None:
    """With gamma 1, lambda 1 and values of 0 the advantage is the sum of the rewards that follow."""
    options = {"gae_lambda": 1.0, **RAW}
    batch, _ = credited([sample(1.0, messages(2, 3))], loss=KL, adv_estimator=options)
    penalties = [0.1 * (-(place + 1) / 10 + 1.0) for place in (2, 3, 4)]  # k1: log p - log p_reference
    want = [1 - sum(penalties[token:]) for token in range(3)]
    assert of_tokens(batch, "advantages")[0] == pytest.approx(want, rel=1e-6)
    assert of_tokens(batch, "returns")[0] == pytest.approx(want, rel=1e-6)


def test_raw_rewards_are_the_discounted_sums_without_the_critic() -> None:
    options = {"name": "raw_reward", "gae_gamma": 0.5, "gae_lambda_value": 1.0, **RAW}
    batch, _ = credited([sample(8.0, messages(1, 3))], [[3.0, 2.0, 1.0]], adv_estimator=options)
    assert of_tokens(batch, "advantages") == of_tokens(batch, "returns") == [[2.0, 4.0, 8.0]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(GeneralizedAdvantageEstimator, {}), (RawRewardAdvantageEstimator, {"name": "raw_reward", "gae_gamma": 0.5})],
)
def test_the_estimators_of_nemo_rl_give_what_the_stage_does(kind: Any, options: dict[str, Any]) -> None:
    batch, _ = credited(
        [sample(1.0, messages(3, 2, 4, 1)), sample(0.0, messages(2, 2))],
        [[0.5, 0.25, 0.1], [0.3, 0.2]],
        loss=KL,
        adv_estimator=options,
    )
    given, rewards = batch.tensors, torch.tensor([1.0, 0.0])
    logprobs = {"logprobs": given["prev_logprobs"], "reference_logprobs": given["reference_policy_logprobs"]}
    estimator = kind(options, KL)
    found = estimator.compute_advantage(None, rewards, given["token_mask"], values=given["values"], **logprobs)
    assert torch.equal(found, given["advantages"])
    with pytest.raises(ValueError, match="needs logprobs"):
        estimator.compute_advantage(None, rewards, given["token_mask"], given["values"])
    if estimator.needs_values:
        with pytest.raises(ValueError, match="GeneralizedAdvantageEstimator needs values"):
            estimator.compute_advantage(None, rewards, given["token_mask"], **logprobs)


def test_the_value_after_the_last_token_may_follow_an_answer() -> None:
    options = {"gae_lambda": 1.0, **RAW}
    ended, _ = credited([sample(0.5, messages(1, 2))], [[0.5, 0.25]], adv_estimator=options)
    assert of_tokens(ended, "returns") == [[0.5, 0.5]]
    samples = [sample(0.5, messages(1, 2)), sample(0.5, messages(1, 1), messages(1, 1))]
    options |= {"bootstrap_truncated": True, "gae_gamma": 0.5}
    batch, _ = credited(samples, [[0.5, 0.25], [0.5], [0.25]], adv_estimator=options)
    for rows in ([0], [1, 2]):
        assert flat([of_tokens(batch, "returns")[row] for row in rows]) == [0.5 * (0.5 + 0.375), 0.5 + 0.375]
        assert flat([of_tokens(batch, "advantages")[row] for row in rows]) == [0.4375 - 0.5, 0.875 - 0.25]


def test_long_answers_have_a_lambda_near_one() -> None:
    """Alpha 0.25: lambda is 0 for 4 tokens and 1/2 for 8; the critic's lambda stays."""
    options = {"length_adaptive_alpha": 0.25, "gae_lambda_value": 1.0, **RAW}
    batch, _ = credited([sample(1.0, messages(1, n)) for n in (4, 8)], adv_estimator=options)
    short, long = of_tokens(batch, "advantages")
    assert short == [0.0, 0.0, 0.0, 1.0]
    assert long == [0.5**n for n in range(7, -1, -1)]
    assert flat(of_tokens(batch, "returns")) == [1.0] * 12


def test_whitened_advantages_of_all_tokens_that_count() -> None:
    """A sample that the loss leaves out enters no statistic and has no advantage."""
    samples = [sample(1.0, messages(1, 2)), sample(-1.0, messages(1, 3)), sample(7.0, messages(1, 2))]
    samples[2].outcome = Outcome.TRUNCATED
    values = [[0.3, 0.1], [0.2, 0.4, 0.0], [5.0, 6.0]]
    batch, metrics = credited(samples, values, mask_truncated=True)
    plain, _ = credited(samples, values, mask_truncated=True, adv_estimator=RAW)
    wanted = flat(of_tokens(plain, "advantages")[:2])
    mean, deviation = statistics.fmean(wanted), math.sqrt(statistics.variance(wanted) + 1e-8)
    found = of_tokens(batch, "advantages")
    assert flat(found[:2]) == pytest.approx([(value - mean) / deviation for value in wanted], rel=1e-5)
    assert found[2] == of_tokens(batch, "returns")[2] == [0.0, 0.0]
    assert metrics["filtered_reward"] == 0.0 and metrics["values_max"] == pytest.approx(0.4)


def test_the_explained_variance_is_that_of_its_definition() -> None:
    samples = [sample(reward, messages(1, 2)) for reward in (1.0, 0.0, 2.0)]
    values = [[0.9, 0.8], [0.1, 0.3], [1.5, 1.9]]
    _, metrics = credited(samples, values, adv_estimator={"gae_lambda_value": 1.0})
    returns = [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]
    errors = [target - value for target, value in zip(returns, flat(values), strict=True)]
    want = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    assert metrics["critic/explained_var"] == pytest.approx(want, rel=1e-5)
    _, equal = credited(samples[:1], values[:1], adv_estimator={"gae_lambda_value": 1.0})
    assert equal["critic/explained_var"] == 0.0


def test_rewards_are_scaled_and_shaped_first() -> None:
    scaling = {"enabled": True, "target_min": -1.0, "target_max": 1.0}
    batch, metrics = credited(
        [sample(0.0, messages(1, 1)), sample(1.0, messages(1, 1))],
        reward_scaling=scaling,
        adv_estimator=RAW,
    )
    assert flat(of_tokens(batch, "returns")) == [-1.0, 1.0]
    assert batch.tensors["positive_examples"].tolist() == [0.0, 1.0]
    assert metrics["filtered_reward"] == 0.0


def test_a_step_without_a_reward_has_no_advantages() -> None:
    failed = sample(None, messages(1, 2), outcome=Outcome.REWARD_ERROR)
    batch, metrics = credited([failed, failed], [[math.nan, 1.0]] * 2)
    assert not batch.tensors["advantages"].any() and not batch.tensors["returns"].any()
    assert metrics["critic/explained_var"] == metrics["values_max"] == metrics["returns_mean"] == 0.0
