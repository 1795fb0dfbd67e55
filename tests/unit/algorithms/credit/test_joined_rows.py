"""Advantages of samples with several rows: by hand, and equal to those of one row with the same tokens."""

from typing import Any

import pytest
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.joined_rows import JoinedRows
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.branches import Branch, StoredTokens
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.batch_rows import pack_rows, paths_of

pytestmark = pytest.mark.fast

KL = ClippedPGLossConfig.build(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)


def messages(*lengths: int, first: int = 1) -> list[dict[str, Any]]:
    """Messages of these numbers of tokens, in turn of the user and of the policy."""
    log: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        ids = torch.arange(first, first + length)
        written = {"generation_logprobs": -torch.ones(length)} if number % 2 else {}
        log.append({"role": "assistant" if number % 2 else "user", "content": "", "token_ids": ids, **written})
        first += length
    return log


def sample(index: int, turn_rewards: list[float], *conversations: list[dict[str, Any]], group: int = 0) -> Trajectory:
    return Trajectory(
        group,
        index,
        0,
        "task",
        conversations[0],
        conversations[0][0]["token_ids"].numel(),
        reward=sum(turn_rewards),
        turn_rewards=turn_rewards,
        reward_components={"first": turn_rewards[0], "rest": sum(turn_rewards[1:])},
        branches=[Branch(log, log[0]["token_ids"].numel()) for log in conversations[1:]],
    )


def samples() -> list[Trajectory]:
    """Two groups; rows of 1, 2, 3, 1 and 1 conversations."""
    return [
        sample(0, [1.0, 0.5], messages(2, 2, 1, 1)),
        sample(1, [0.0, 2.0], messages(2, 3), messages(1, 1)),
        sample(2, [0.0, 0.0, 0.25], messages(2, 1), messages(4, 1), messages(1, 2)),
        sample(0, [3.0], messages(1, 1), group=1),
        sample(1, [1.0], messages(1, 4), group=1),
    ]


def as_one(trajectory: Trajectory) -> Trajectory:
    """The sample with its conversations as one."""
    log = [message for conversation in trajectory.logs for message in conversation]
    first, *_ = trajectory.logs
    return sample(trajectory.sample_index, trajectory.turn_rewards, log, group=trajectory.group_index)


def credited(
    trajectories: list[Trajectory], loss: ClippedPGLossConfig | None = None, **grpo: Any
) -> tuple[BatchedDataDict[Any], dict[str, float]]:
    loss = loss or ClippedPGLossConfig.build()
    batch = build_training_batch(trajectories, 0, mask_truncated=False)
    if loss.use_kl_in_reward:
        batch["prev_logprobs"] = -batch["input_ids"].float() / 10
        batch["reference_policy_logprobs"] = -(batch["input_ids"].float() % 3)
    config = GRPOConfig.build(**grpo)
    return batch, CreditAssignment(make_advantage_estimator(config, loss), config).assign(batch, trajectories)


def of_rows(batch: BatchedDataDict[Any]) -> list[list[float]]:
    """The advantages of the written tokens of each row."""
    return [
        [round(value, 4) for value in values[mask > 0].tolist()]
        for values, mask in zip(batch["advantages"], batch["token_mask"], strict=True)
    ]


def test_each_row_has_the_advantage_of_its_sample() -> None:
    """Rewards of the first group are 1.5, 2 and 0.25 with mean 1.25; those of the second are 3 and 1."""
    batch, metrics = credited(samples(), adv_estimator={"name": "dr_grpo"})
    assert of_rows(batch) == [[0.25] * 3, [0.75] * 3, [0.75], [-1.0], [-1.0], [-1.0] * 2, [1.0], [-1.0] * 4]
    assert metrics["filtered_reward"] == pytest.approx((1.5 + 2 + 0.25 + 3 + 1) / 5)
    assert metrics["advantages/mean"] == pytest.approx((0.25 * 3 + 0.75 * 4 - 4 + 1 - 4) / 16)
    assert batch["positive_examples"].tolist() == [1.0] * 8


def test_leave_one_out_baselines_are_of_the_other_samples() -> None:
    batch, _ = credited(samples(), adv_estimator={"name": "rloo"})
    first, second, third = 1.5 - 1.125, 2 - 0.875, 0.25 - 1.75
    expected = [[first] * 3, [second] * 3, [second], [third], [third], [third] * 2, [2.0], [-2.0] * 4]
    assert of_rows(batch) == expected


def test_turns_are_numbered_through_the_rows() -> None:
    """Second turns earned 0.5, 2 and 0, mean 5/6; the third sample's third turn is compared with no other."""
    options = {"name": "dr_grpo", "credit": "turn_rewards", "turn_discount": 0.0}
    batch, _ = credited(samples(), adv_estimator=options)
    first = [1 - 1 / 3, -1 / 3, -1 / 3]
    second = [0.5 - 5 / 6, 2 - 5 / 6, -5 / 6]
    expected = [
        [first[0], first[0], second[0]],
        [first[1]] * 3,
        [second[1]],
        [first[2]],
        [second[2]],
        [0.0] * 2,
        [1.0],
        [-1.0] * 4,
    ]
    assert of_rows(batch) == [[round(value, 4) for value in row] for row in expected]


ESTIMATORS: dict[str, tuple[dict[str, Any], ClippedPGLossConfig | None]] = {
    "grpo": ({"name": "grpo"}, None),
    "batch deviation": ({"name": "grpo", "std_level": "batch"}, None),
    "rloo": ({"name": "rloo"}, None),
    "dr_grpo": ({"name": "dr_grpo"}, None),
    "gdpo": ({"name": "gdpo"}, None),
    "reinforce_plus_plus": ({"name": "reinforce_plus_plus"}, None),
    "baseline": ({"name": "reinforce_plus_plus", "minus_baseline": True}, None),
    "kl": ({"name": "reinforce_plus_plus"}, KL),
    "kl to go": ({"name": "reinforce_plus_plus", "kl_to_go": True}, KL),
    "returns": ({"name": "grpo", "credit": "turn_returns", "turn_discount": 0.5}, None),
    "turn rewards": ({"name": "grpo", "credit": "turn_rewards", "turn_discount": 0.5}, None),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_have_the_advantages_of_one_conversation_with_the_same_tokens(name: str) -> None:
    estimator, loss = ESTIMATORS[name]
    rows, row_metrics = credited(samples(), loss, adv_estimator=estimator)
    one, one_metrics = credited([as_one(each) for each in samples()], loss, adv_estimator=estimator)
    assert rows["advantages"].shape == (8, 6) and one["advantages"].shape == (5, 11)
    written = [batch["advantages"][batch["token_mask"] > 0] for batch in (rows, one)]
    torch.testing.assert_close(written[0], written[1])
    assert not rows["advantages"][rows["token_mask"] == 0].any()
    assert row_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-6)


def test_a_row_that_does_not_train_has_no_advantage_and_its_sample_stays_in_the_statistics() -> None:
    made = samples()
    made[1].branches[0].trains = False
    made[2].loss_multiplier = 0.0
    batch, metrics = credited(made, adv_estimator={"name": "dr_grpo"})
    assert of_rows(batch) == [[0.25] * 3, [0.75] * 3, [0.0], [0.0], [0.0], [0.0] * 2, [1.0], [-1.0] * 4]
    assert metrics["filtered_reward"] == pytest.approx((1.5 + 2 + 3 + 1) / 4)


def test_fixed_advantages_reach_the_turns_and_tags_of_branches() -> None:
    made = samples()
    made[1].invalid_tool_call_turns = [False, True]
    made[2].malformed_thinking = [(2, 3), (10, 11)]
    options: dict[str, Any] = {"invalid_tool_call_advantage": -7.0, "malformed_thinking_advantage": -9.0}
    batch, _ = credited(made, adv_estimator={"name": "dr_grpo"}, **options)
    assert of_rows(batch)[1:6] == [[0.75] * 3, [-7.0], [-9.0], [-1.0], [-1.0, -9.0]]


def test_stored_rows_have_the_advantages_of_their_samples() -> None:
    expected, expected_metrics = credited(samples())
    light = samples()
    for each in light:
        packed = pack_rows(each.logs)
        for number, (one, path) in enumerate(zip(each.conversations, paths_of(packed), strict=True)):
            rows: Any = "in the store"
            one.stored = StoredTokens(path, number, rows)
    batch, metrics = credited(light)
    means = expected["advantages"].sum(1) / expected["token_mask"].sum(1)
    torch.testing.assert_close(batch["advantages"], means[:, None])
    assert torch.equal(batch["positive_examples"], expected["positive_examples"])
    assert metrics == pytest.approx(expected_metrics)


def test_values_are_joined_and_cut() -> None:
    joined = JoinedRows(torch.tensor([2, 1, 2]), torch.tensor([2, 3, 1, 1, 2]))
    values = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0], [7, 0, 0], [8, 9, 0]])
    assert joined.join(values).tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0], [7, 8, 9, 0, 0]]
    assert torch.equal(joined.cut(joined.join(values)), values)
    assert joined.join(values > 3).tolist()[0] == [False, False, False, True, True]
    assert joined.repeat(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 1, 2, 3, 3]
    assert joined.largest(torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0])).tolist() == [1, 0, 2]
    padded = torch.nn.functional.pad(values, (0, 2), value=-1)
    assert torch.equal(joined.join(padded), joined.join(values))


def test_without_branches_nothing_is_copied() -> None:
    joined = JoinedRows(torch.tensor([1, 1]), torch.tensor([2, 3]))
    values = torch.ones(2, 3)
    assert joined.join(values) is values and joined.cut(values) is values
    assert joined.largest(values[:, 0]).tolist() == [1, 1]


def test_samples_and_rows_have_to_fit() -> None:
    with pytest.raises(ValueError, match="The 2 samples have 3 conversations, but the batch has 4 rows"):
        JoinedRows.of(samples()[:2], torch.ones(4))
    assert JoinedRows.of(samples()[:2], torch.ones(3)).num_rows_B.tolist() == [1, 2]
