"""From trajectories to batches and advantages; sources of rollouts; which forward passes run."""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.reward_shaping import scale_rewards
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch, mask_sequences
from nemo_rl.algorithms.rollout.source import DynamicSampling, Group
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.scoring import PolicyScoring
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig, RewardScalingConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.utils.errors import NothingToLearnError

pytestmark = pytest.mark.fast


def make_trajectory(
    group: int, reward: float | None, response: int = 2, outcome: Outcome = Outcome.FINISHED
) -> Trajectory:
    """Two prompt tokens, `response` written tokens, one environment token, one written token."""
    written = torch.arange(response) + 10
    log: list[dict[str, Any]] = [
        {"role": "user", "content": "", "token_ids": torch.tensor([1, 2])},
        {
            "role": "assistant",
            "content": "",
            "token_ids": written,
            "generation_logprobs": -torch.ones(response),
        },
        {"role": "environment", "content": "", "token_ids": torch.tensor([3])},
        {
            "role": "assistant",
            "content": "",
            "token_ids": torch.tensor([4]),
            "generation_logprobs": torch.tensor([-2.0]),
        },
    ]
    return Trajectory(group, 0, 0, "math", log, 2, reward=reward, outcome=outcome)


def test_answers_without_a_reward_count_where_no_reward_is_learned_from() -> None:
    made = [make_trajectory(0, None, outcome=Outcome.REWARD_ERROR), make_trajectory(0, None)]
    made[1].loss_multiplier = 0.0
    for needed, mask in ((True, [0.0, 0.0]), (False, [1.0, 0.0])):
        batch = build_training_batch(made, 99, mask_truncated=False, needs_reward=needed)
        assert batch["sample_mask"].tolist() == mask


def test_only_tokens_of_the_policy_count() -> None:
    batch = build_training_batch(
        [make_trajectory(0, 1.0), make_trajectory(0, 0.0, response=4)], 99, mask_truncated=False
    )
    assert batch["input_ids"].tolist() == [
        [1, 2, 10, 11, 3, 4, 99, 99],
        [1, 2, 10, 11, 12, 13, 3, 4],
    ]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 1]]
    assert batch["generation_logprobs"][0].tolist() == [0, 0, -1, -1, 0, -2, 0, 0]
    assert batch["input_lengths"].tolist() == [6, 8]
    assert batch["sample_mask"].tolist() == [1, 1]


def test_samples_without_a_reward_and_overlong_ones_leave_the_loss() -> None:
    trajectories = [
        make_trajectory(0, 1.0),
        make_trajectory(0, None, outcome=Outcome.REWARD_ERROR),
        make_trajectory(0, 1.0, outcome=Outcome.TRUNCATED),
    ]
    plain = build_training_batch(trajectories, 0, mask_truncated=False)
    filtered = build_training_batch(trajectories, 0, mask_truncated=True)
    assert plain["sample_mask"].tolist() == [1, 0, 1]
    assert filtered["sample_mask"].tolist() == [1, 0, 0]


def credit_for(**grpo: Any) -> CreditAssignment:
    config = GRPOConfig.build(**grpo)
    return CreditAssignment(make_advantage_estimator(config, ClippedPGLossConfig.build()), config)


def test_advantages_by_hand_with_a_failed_sample_left_out() -> None:
    trajectories = [
        make_trajectory(0, 1.0),
        make_trajectory(0, 0.0),
        make_trajectory(0, None, outcome=Outcome.REWARD_ERROR),
        make_trajectory(1, 3.0),
        make_trajectory(1, 1.0),
    ]
    batch = build_training_batch(trajectories, 0, mask_truncated=False)
    credit = credit_for(normalize_rewards=False, use_leave_one_out_baseline=False)
    metrics = credit.assign(batch, trajectories)
    assert batch["advantages"].dtype == torch.float32
    assert batch["advantages"][:, 2].tolist() == [0.5, -0.5, 0.0, 1.0, -1.0]
    assert (batch["advantages"] * (1 - batch["token_mask"])).abs().sum() == 0
    assert metrics["filtered_reward"] == pytest.approx((1 + 0 + 3 + 1) / 4)
    assert metrics["advantages/max"] == 1.0


def test_scaling_and_shaping_change_advantages_but_not_the_reward_metric() -> None:
    trajectories = [make_trajectory(0, 1.0), make_trajectory(0, 0.0)]
    batch = build_training_batch(trajectories, 0, mask_truncated=False)
    scaling = {"enabled": True, "target_min": -2.0, "target_max": 2.0}
    credit = credit_for(normalize_rewards=False, use_leave_one_out_baseline=False, reward_scaling=scaling)
    credit.assign(batch, trajectories)
    assert batch["advantages"][:, 2].tolist() == [2.0, -2.0]
    assert [t.reward for t in trajectories] == [1.0, 0.0]


def samples_of(num_samples: int) -> Any:
    """A batch of samples of three tokens."""
    return build_training_batch([make_trajectory(0, 1.0) for _ in range(num_samples)], 0, mask_truncated=False)


def masked(batch: Any, errors: list[float], rewards: list[float | None], threshold: float | None) -> dict[str, float]:
    """Mask rows, of which the trainer gives the first token e^error times the engine's p."""
    prev_BT = batch["generation_logprobs"].clone()
    prev_BT[:, 2] += torch.tensor(errors)
    prev_BT[:, 0] = -200.0  # the prompt's, which do not count, may overflow
    policy: Any = SimpleNamespace(get_logprobs=lambda _: {"logprobs": prev_BT})
    return mask_sequences(batch, BatchRows.of(batch).score(policy), rewards, threshold)


def error_metrics(largest: float, smallest: float, mean: float, suffix: str = "") -> dict[str, float]:
    names = (f"{kind}_seq_mult_prob_error{suffix}" for kind in ("max", "min", "mean"))
    return dict(zip(names, (largest, smallest, mean), strict=True))


def test_sequences_whose_probabilities_disagree_are_masked() -> None:
    """Samples of three tokens with a mean of (e^x + 2) / 3; of the two beyond 2 one has a positive reward."""
    batch = samples_of(4)
    metrics = masked(batch, [0.0, 3.0, 2.0, 0.5], [1.0, 0.5, 0.0, None], threshold=2.0)
    none, three, two, half = ((math.exp(x) + 2) / 3 for x in (0.0, 3.0, 2.0, 0.5))
    assert batch["sample_mask"].tolist() == [1, 0, 0, 1]
    assert metrics == pytest.approx(
        {
            **error_metrics(three, none, (none + three + two + half) / 4),
            **error_metrics(half, none, (none + half) / 2, "_after_mask"),
            "num_masked_seqs": 2.0,
            "masked_correct_pct": 0.5,
        },
        rel=1e-5,
    )


def test_errors_of_sequences_are_means_over_samples_with_a_token_that_counts() -> None:
    """One sample of four is masked already and one has no token: a mean over all of them would be below 1."""
    batch = samples_of(4)
    batch["sample_mask"][2] = 0
    batch["token_mask"][3] = 0
    first = (math.exp(1.0) + 2) / 3
    metrics = masked(batch, [1.0, 0.0, 5.0, 5.0], [1.0] * 4, threshold=None)
    expected = error_metrics(first, 1.0, (first + 1) / 2) | error_metrics(first, 1.0, (first + 1) / 2, "_after_mask")
    assert metrics == pytest.approx(expected | {"num_masked_seqs": 0.0, "masked_correct_pct": 0.0}, rel=1e-6)
    assert batch["sample_mask"].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("threshold", [None, 1.5])
def test_errors_of_no_sequence_are_zero(threshold: float | None) -> None:
    batch = samples_of(2)
    batch["sample_mask"][:] = 0
    metrics = masked(batch, [1.0, 2.0], [1.0, 1.0], threshold)
    assert len(metrics) == 8 and not any(metrics.values())
    beyond = masked(samples_of(2), [3.0, 4.0], [0.0, 0.0], 1.5)
    assert beyond["num_masked_seqs"] == 2
    assert {value for name, value in beyond.items() if name.endswith("_after_mask")} == {0.0}


class Scores:
    """A policy that gives every token one log-probability."""

    def get_logprobs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"logprobs": torch.full_like(batch["generation_logprobs"], -1.0)}


@pytest.mark.parametrize("needs_prev", [False, True])
def test_errors_of_sequences_are_always_logged(needs_prev: bool) -> None:
    """By this stage where it has `prev_logprobs`; else by the loss, whose update is the first to know them."""
    trajectories = [make_trajectory(0, 1.0), make_trajectory(0, 0.0, outcome=Outcome.TRUNCATED)]
    tensors = build_training_batch(trajectories, 0, mask_truncated=True)
    stage = PolicyScoring(Scores(), needs_prev, needs_reference=False)  # type: ignore[arg-type]
    metrics = stage.apply(StepBatch(tensors, trajectories))
    if not needs_prev:
        assert tensors["num_counted_samples"].tolist() == [1.0, 1.0]
        tensors["advantages"] = torch.zeros_like(tensors["token_mask"])
        logprobs = torch.full_like(tensors["token_mask"][:, 1:], -1.0)
        loss_fn = ClippedPGLossFn(ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0))
        metrics |= loss_fn(logprobs, tensors, global_valid_seqs=1.0, global_valid_toks=3.0)[1]
    # The engine's log-probabilities are -1, -1 and -2.
    error = (1 + 1 + math.exp(1.0)) / 3
    expected = error_metrics(error, error, error) | error_metrics(error, error, error, "_after_mask")
    expected |= {"num_masked_seqs": 0.0, "masked_correct_pct": 0.0}
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-6)


class Rounds:
    """Gives prepared groups of rewards, one list of groups per collection."""

    def __init__(self, *rounds: list[list[float]]):
        self.rounds = rounds
        self.asked: list[int] = []

    max_staleness = 0

    def next_groups(self, step: int) -> Iterator[Group]:
        round_index = len(self.asked)
        self.asked.append(round_index)
        self.metrics = {"math/round": float(round_index)}
        groups = list(enumerate(self.rounds[round_index]))
        for g, rewards in reversed(groups):
            yield Group((round_index, g), [make_trajectory(g, r) for r in rewards])


def test_dynamic_sampling_keeps_groups_that_differ_and_asks_again() -> None:
    rounds = Rounds([[1, 1], [0, 1], [0, 0]], [[1, 0], [0, 1], [1, 1]])
    source = DynamicSampling(rounds, num_groups=2, max_rounds=5)  # type: ignore[arg-type]
    given = list(source.next_groups(1))
    assert [group.order for group in given if not group.trains] == [(0, 0), (0, 2), (1, 1), (1, 2)]
    groups = [group for group in given if group.trains]
    assert rounds.asked == [0, 1]
    assert [(group.order, [t.reward for t in group.trajectories]) for group in groups] == [
        ((0, 1), [0, 1]),
        ((1, 0), [1, 0]),
    ]
    assert source.metrics["dynamic_sampling_num_gen_batches"] == 2
    assert source.metrics["dynamic_sampling_num_discarded_valid_samples"] == 2
    assert source.metrics["dynamic_sampling_kept_share"] == 0.5
    assert source.metrics["math/round"] == 0.5


def test_dynamic_sampling_looks_at_scaled_rewards() -> None:
    """60 and 80 points are both cut to 50: such a group has no advantage."""
    rounds = Rounds([[60.0, 80.0], [20.0, 80.0]])
    scale = partial(scale_rewards, config=RewardScalingConfig.build(enabled=True, source_max=50.0))
    source = DynamicSampling(rounds, num_groups=1, max_rounds=1, scale=scale)  # type: ignore[arg-type]
    assert [group.order for group in source.next_groups(1) if group.trains] == [(0, 1)]


def test_dynamic_sampling_ends_the_run_in_order_when_nothing_differs_any_more() -> None:
    rounds = Rounds([[1, 1]], [[0, 0]])
    with pytest.raises(DataExhausted, match=r"found 0 of 1 prompts .* 2 prompts .*max_gen_batches=2"):
        list(DynamicSampling(rounds, num_groups=1, max_rounds=2).next_groups(1))  # type: ignore[arg-type]


def test_dynamic_sampling_without_any_reward_is_an_error() -> None:
    rounds = Rounds([[None, None]], [[None, None]])  # type: ignore[list-item]
    with pytest.raises(NothingToLearnError, match="no reward for any answer to 2 prompts"):
        list(DynamicSampling(rounds, num_groups=1, max_rounds=2).next_groups(1))  # type: ignore[arg-type]
