"""Advantage estimators against loops over floats, and the invariants that they keep."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.group_statistics import (
    calculate_baseline_and_std_per_prompt,
    group_ids_from_prompts,
    sample_std_plus_epsilon,
    std_with_floor,
    whiten,
)
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

PROMPTS = torch.tensor([[1, 2], [3, 4], [1, 2], [1, 2], [3, 4], [9, 9]])
REWARDS = torch.tensor([1.0, 0.5, 0.0, 4.0, 0.25, 7.0])
MASK = torch.tensor([[0.0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]])


def estimator(loss=None, clip=(None, None), **options):
    grpo = GRPOConfig.build(
        adv_estimator={"normalize_rewards": True, "use_leave_one_out_baseline": True} | options,
        advantage_clip_low=clip[0],
        advantage_clip_high=clip[1],
    )
    return make_advantage_estimator(grpo, ClippedPGLossConfig.build(**(loss or {})))


def reference_statistics(rewards, groups, valid, leave_one_out):
    """(baseline, std) per row, by loops."""
    result = []
    for i, group in enumerate(groups):
        members = [j for j in range(len(groups)) if groups[j] == group and valid[j]]
        peers = [rewards[j] for j in members if not (leave_one_out and j == i)]
        if len(members) <= 1:
            result.append((rewards[i], 0.0))
        else:
            result.append((statistics.fmean(peers), sample_std(peers)))
    return result


def sample_std(values):
    """With n - 1; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def reference_group_advantage(rewards, groups, valid, leave_one_out, normalize):
    advantages = []
    for i, (mean, std) in enumerate(reference_statistics(rewards, groups, valid, leave_one_out)):
        value = rewards[i] - mean
        if normalize and std > 0:
            value /= std + 1e-6
        advantages.append(value if valid[i] else 0.0)
    return advantages


def on_tokens(advantages, mask=MASK):
    return torch.tensor([[a if m else 0.0 for m in row] for a, row in zip(advantages, mask.tolist(), strict=True)])


def test_statistics_by_hand():
    everyone = torch.ones(6)
    baseline, std = calculate_baseline_and_std_per_prompt(PROMPTS, REWARDS, everyone, False)
    assert baseline.tolist() == pytest.approx([5 / 3, 0.375, 5 / 3, 5 / 3, 0.375, 7.0])
    spread, half = statistics.stdev([1, 0, 4]), 0.25 / 2**0.5
    assert std.tolist() == pytest.approx([spread, half, spread, spread, half, 0.0])
    baseline, std = calculate_baseline_and_std_per_prompt(PROMPTS, REWARDS, everyone)
    assert baseline.tolist() == pytest.approx([2.0, 0.25, 2.5, 0.5, 0.5, 7.0])
    assert std.tolist() == pytest.approx([8**0.5, 0.0, 4.5**0.5, 0.5**0.5, 0.0, 0.0])
    assert baseline.dtype == std.dtype == torch.float32


def test_std_may_come_from_other_rewards():
    ones = torch.ones(6)
    baseline, std = calculate_baseline_and_std_per_prompt(PROMPTS, REWARDS, ones, False, std_rewards=10 * REWARDS)
    assert baseline[1].item() == pytest.approx(0.375)
    assert std[1].item() == pytest.approx(2.5 / 2**0.5)


@pytest.mark.parametrize("group_size", [2, 4, 8, 16])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_deviations_are_those_of_a_sample(group_size, leave_one_out):
    """Against torch.std, whose default divides by n - 1, on the set that the baseline is made of."""
    rewards = torch.rand(3, group_size, generator=torch.Generator().manual_seed(group_size), dtype=torch.float64)
    ids = torch.arange(3).repeat_interleave(group_size)
    subject = estimator(use_leave_one_out_baseline=leave_one_out)
    result = subject.compute_advantage(None, rewards.flatten(), torch.ones(3 * group_size, 1), group_ids=ids)
    for group in range(3):
        for i in range(group_size):
            peers = torch.cat([rewards[group, :i], rewards[group, i + 1 :]]) if leave_one_out else rewards[group]
            want = rewards[group, i] - peers.mean()
            if len(peers) > 1:  # a single reward has no deviation
                want = want / (peers.std() + 1e-6)
            assert result[group * group_size + i, 0].item() == pytest.approx(want.item(), rel=1e-9)


def test_deviation_of_the_batch():
    """`(r - group mean) / std of all valid rewards`; equal rewards have no deviation."""
    valid = torch.tensor([1.0, 1, 1, 1, 0, 1])
    subject = estimator(use_leave_one_out_baseline=False, std_level="batch")
    result = subject.compute_advantage(PROMPTS, REWARDS, torch.ones(6, 1), valid_mask=valid)[:, 0]
    std = statistics.stdev([1.0, 0.5, 0.0, 4.0, 7.0]) + 1e-6
    centred = [1.0 - 5 / 3, 0.0, -5 / 3, 4 - 5 / 3, 0.0, 0.0]
    assert result.tolist() == pytest.approx([c / std for c in centred], rel=1e-6)
    equal = subject.compute_advantage(PROMPTS, torch.full((6,), 0.1), torch.ones(6, 1))
    assert not equal.any()
    with pytest.raises(ConfigError, match=r"std_level=batch only works with .*name=grpo"):
        estimator(name="rloo", std_level="batch")


def test_invalid_rows_enter_no_statistic():
    valid = torch.tensor([1.0, 1, 1, 0, 0, 1])
    baseline, std = calculate_baseline_and_std_per_prompt(PROMPTS, REWARDS, valid, False)
    assert baseline.tolist()[:3] == pytest.approx([0.5, 0.5, 0.5])
    assert std.tolist()[:3] == pytest.approx([0.5**0.5, 0.0, 0.5**0.5])
    assert (baseline[4], std[4]) == (0.25, 0.0)  # one valid row in its group: its own reward
    rewards = REWARDS.clone()
    rewards[3] = torch.nan  # a reward error may be anything
    result = estimator().compute_advantage(PROMPTS, rewards, MASK, valid_mask=valid)
    assert torch.isfinite(result).all()
    assert not result[3].any() and not result[4].any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 3.7]),
            st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=14,
    ),
    leave_one_out=st.booleans(),
    normalize=st.booleans(),
)
def test_group_advantages_equal_the_reference(rows, leave_one_out, normalize):
    rewards = [r for r, _, _ in rows]
    groups = [g for _, g, _ in rows]
    valid = [v for _, _, v in rows]
    subject = estimator(use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalize)
    result = subject.compute_advantage(
        None,
        torch.tensor(rewards, dtype=torch.float64),
        torch.ones(len(rows), 1),
        group_ids=torch.tensor(groups),
        valid_mask=torch.tensor(valid).float(),
    )
    expected = reference_group_advantage(rewards, groups, valid, leave_one_out, normalize)
    assert result[:, 0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e6 + 0.1])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_exactly_zero_spread(reward, leave_one_out):
    """Rounding noise divided by (noise + 1e-6) would be an enormous advantage."""
    rewards = torch.full((16,), reward)
    outlier = rewards.clone()
    outlier[5] += max(1.0, 1e-4 * reward)
    groups = torch.zeros(16, 1, dtype=torch.int64)
    _, std = calculate_baseline_and_std_per_prompt(groups, rewards, torch.ones(16), leave_one_out)
    assert std.tolist() == [0.0] * 16
    if leave_one_out:
        _, std = calculate_baseline_and_std_per_prompt(groups, outlier, torch.ones(16), True)
        assert std[5].item() == 0.0 and (std[:5] > 0.1).all()
        result = estimator().compute_advantage(groups, outlier, torch.ones(16, 1))
        assert result[5].item() == pytest.approx((outlier[5] - rewards[5]).item(), rel=1e-6)


def test_group_ids_and_equal_prompts_mean_the_same():
    ids = group_ids_from_prompts(PROMPTS)
    assert [(ids == i).tolist() for i in ids] == [(row == PROMPTS).all(1).tolist() for row in PROMPTS]
    by_prompt = estimator().compute_advantage(PROMPTS, REWARDS, MASK)
    by_id = estimator().compute_advantage(None, REWARDS, MASK, group_ids=torch.tensor([7, -2, 7, 7, -2, 0]))
    assert torch.equal(by_prompt, by_id)
    with pytest.raises(DataError, match="group_ids"):
        estimator().compute_advantage(None, REWARDS, MASK)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_fills_the_tokens_that_count(leave_one_out, normalize):
    subject = estimator(use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalize)
    groups = PROMPTS[:, 0].tolist()
    expected = reference_group_advantage(REWARDS.tolist(), groups, [1] * 6, leave_one_out, normalize)
    result = subject.compute_advantage(PROMPTS, REWARDS, MASK)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, on_tokens(expected))


@pytest.mark.parametrize(("name", "leave_one_out"), [("rloo", True), ("dr_grpo", False)])
def test_rloo_and_dr_grpo_are_settings_of_grpo(name, leave_one_out):
    config = GRPOConfig.build()
    config.adv_estimator.name = name
    named = make_advantage_estimator(config, ClippedPGLossConfig.build())
    same = estimator(use_leave_one_out_baseline=leave_one_out, normalize_rewards=False)
    arguments = (PROMPTS, REWARDS, MASK)
    assert torch.equal(named.compute_advantage(*arguments), same.compute_advantage(*arguments))


def test_clipping_bounds_the_final_advantage():
    free = estimator().compute_advantage(PROMPTS, REWARDS, MASK)
    assert free.min() < -0.3 and free.max() > 0.9
    both = estimator(clip=(-0.3, 0.9)).compute_advantage(PROMPTS, REWARDS, MASK)
    assert torch.equal(both, free.clamp(-0.3, 0.9))
    above = estimator(clip=(None, 0.9)).compute_advantage(PROMPTS, REWARDS, MASK)
    assert torch.equal(above, free.clamp(max=0.9))


def test_gdpo_normalises_each_component():
    components = {"correct": REWARDS, "format": 100 * REWARDS.flip(0)}
    weights = [1.0, 0.25]
    subject = estimator(name="gdpo", reward_weights=weights, use_leave_one_out_baseline=False)
    valid = [1, 1, 1, 1, 1, 0]
    result = subject.compute_advantage(
        PROMPTS, REWARDS, MASK, reward_components=components, valid_mask=torch.tensor(valid)
    )
    groups = PROMPTS[:, 0].tolist()
    summed = [0.0] * 6
    for weight, values in zip(weights, components.values(), strict=True):
        part = reference_group_advantage(values.tolist(), groups, valid, False, True)
        summed = [s + weight * p for s, p in zip(summed, part, strict=True)]
    kept = summed[:5]
    mean, std = statistics.fmean(kept), statistics.stdev(kept)
    expected = [(s - mean) / (std + 1e-6) for s in kept] + [0.0]
    torch.testing.assert_close(result, on_tokens(expected))


def test_gdpo_whitens_always():
    """Without `normalize_rewards` too: a component from 0 to 100 must not make advantages of that size."""
    components = {"a": REWARDS, "points": 100 * REWARDS.flip(0)}
    subject = estimator(name="gdpo", normalize_rewards=False, use_leave_one_out_baseline=False)
    result = subject.compute_advantage(PROMPTS, REWARDS, torch.ones(6, 1), reward_components=components)[:, 0]
    groups = PROMPTS[:, 0].tolist()
    parts = [reference_group_advantage(v.tolist(), groups, [1] * 6, False, False) for v in components.values()]
    summed = [a + b for a, b in zip(*parts, strict=True)]
    mean, std = statistics.fmean(summed), statistics.stdev(summed)
    assert result.tolist() == pytest.approx([(s - mean) / (std + 1e-6) for s in summed], rel=1e-5)


def test_gdpo_needs_components_and_matching_weights():
    with pytest.raises(DataError, match="component"):
        estimator(name="gdpo").compute_advantage(PROMPTS, REWARDS, MASK)
    with pytest.raises(ConfigError, match="1 values for 2 reward components"):
        estimator(name="gdpo", reward_weights=[1.0]).compute_advantage(
            PROMPTS, REWARDS, MASK, reward_components={"a": REWARDS, "b": REWARDS}
        )


def reference_reinforce_plus_plus(minus_baseline, valid, kl=None, beta=0.0, kl_to_go=False):
    """Loops over tokens: reward minus baseline minus beta times KL, of the token or to go, then whitening."""
    groups = PROMPTS[:, 0].tolist()
    rewards = REWARDS.tolist()
    if minus_baseline:
        rewards = reference_group_advantage(rewards, groups, valid, False, False)
    raw = {}
    for b in range(6):
        for t in range(4):
            if MASK[b, t] and valid[b]:
                last = 4 if kl_to_go else t + 1
                penalty = sum(kl[b][s] for s in range(t, last) if MASK[b, s]) if kl else 0.0
                raw[b, t] = rewards[b] - beta * penalty
    mean, std = statistics.fmean(raw.values()), statistics.pstdev(raw.values())
    result = torch.zeros(6, 4)
    for (b, t), value in raw.items():
        result[b, t] = (value - mean) / math.sqrt(max(std**2, 1e-8))
    return result


@pytest.mark.parametrize("minus_baseline", [True, False])
@pytest.mark.parametrize("valid", [[1] * 6, [1, 1, 0, 1, 1, 0]])
def test_reinforce_plus_plus_whitens_over_tokens(minus_baseline, valid):
    subject = estimator(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    assert not subject.needs_logprobs
    result = subject.compute_advantage(PROMPTS, REWARDS, MASK, valid_mask=torch.tensor(valid))
    torch.testing.assert_close(result, reference_reinforce_plus_plus(minus_baseline, valid))


@pytest.mark.parametrize("kl_to_go", [False, True])
def test_reinforce_plus_plus_with_kl_in_the_reward(kl_to_go):
    gen = torch.Generator().manual_seed(0)
    policy, reference = -2 * torch.rand(2, 6, 4, generator=gen)
    policy[0, 0] = -torch.inf  # a position that does not count
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"}
    subject = estimator(loss, name="reinforce_plus_plus", kl_to_go=kl_to_go)
    assert subject.needs_logprobs
    result = subject.compute_advantage(PROMPTS, REWARDS, MASK, logprobs_policy=policy, logprobs_reference=reference)
    kl = (policy - reference).tolist()
    torch.testing.assert_close(result, reference_reinforce_plus_plus(True, [1] * 6, kl, 0.3, kl_to_go))
    with pytest.raises(DataError, match="logprobs_policy"):
        subject.compute_advantage(PROMPTS, REWARDS, MASK)


@pytest.mark.parametrize("divisor", [sample_std_plus_epsilon, std_with_floor])
@settings(max_examples=50, deadline=None)
@given(entries=st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=20))
def test_whitening(divisor, entries):
    values = torch.tensor([v for v, _ in entries], dtype=torch.float64)
    mask = torch.tensor([m for _, m in entries]).double()
    result = whiten(values, mask, divisor)
    assert torch.isfinite(result).all() and not result[mask == 0].any()
    kept = result[mask != 0]
    if len(kept):
        assert kept.mean().item() == pytest.approx(0, abs=1e-5)
        assert kept.pow(2).mean().item() <= 1 + 1e-9
    original = values[mask != 0]
    correction = int(divisor is sample_std_plus_epsilon)
    if len(kept) > correction and original.std(correction=correction) > 0.1:
        assert kept.std(correction=correction).item() == pytest.approx(1, rel=1e-4)


def test_reinforce_plus_plus_divides_by_the_root_of_the_variance():
    """Rewards 1 and 0 on one token each: mean 1/2, variance 1/4, so exactly 1 and -1, without an epsilon."""
    subject = estimator(name="reinforce_plus_plus", minus_baseline=False)
    ids, mask = torch.tensor([0, 0]), torch.ones(2, 1)
    result = subject.compute_advantage(None, torch.tensor([1.0, 0.0], dtype=torch.float64), mask, group_ids=ids)
    assert result[:, 0].tolist() == [1.0, -1.0]
    # Variance (1e-5 / 2)^2 = 2.5e-11 is below 1e-8: the deviations are divided by 1e-4.
    close = subject.compute_advantage(None, torch.tensor([1e-5, 0.0], dtype=torch.float64), mask, group_ids=ids)
    assert close[:, 0].tolist() == pytest.approx([0.05, -0.05], rel=1e-9)


def test_kl_in_the_reward_has_the_clamps_of_the_loss():
    """Log-ratios of 3 and 0.5 with a clamp of 1: k1 penalties of 1 and 0.5. NeMo RL always clamps at 20 and 10."""
    loss = {
        "use_kl_in_reward": True,
        "reference_policy_kl_penalty": 0.2,
        "reference_policy_kl_type": "k1",
        "kl_input_clamp_value": 1.0,
    }
    subject = estimator(loss, name="reinforce_plus_plus", minus_baseline=False)
    policy, reference = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[-4.0], [-1.5]])
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = subject.compute_advantage(
        None,
        rewards,
        torch.ones(2, 1),
        group_ids=torch.tensor([0, 0]),
        logprobs_policy=policy,
        logprobs_reference=reference,
    )
    raw = [1.0 - 0.2 * 1.0, 0.0 - 0.2 * 0.5]
    mean, std = statistics.fmean(raw), statistics.pstdev(raw)
    assert result[:, 0].tolist() == pytest.approx([(value - mean) / std for value in raw], rel=1e-9)


def test_advantages_of_a_group_sum_to_zero_without_leave_one_out():
    result = estimator(use_leave_one_out_baseline=False).compute_advantage(PROMPTS, REWARDS.double(), torch.ones(6, 1))
    for group in (1, 3, 9):
        assert result[PROMPTS[:, 0] == group].sum().item() == pytest.approx(0, abs=1e-12)


def test_wrong_settings_are_refused():
    config = GRPOConfig.build()
    config.adv_estimator.name = "gropo"
    with pytest.raises(ConfigError, match="grpo, dr_grpo, rloo, gdpo, reinforce_plus_plus"):
        make_advantage_estimator(config, ClippedPGLossConfig.build())
    with pytest.raises(ConfigError, match="reinforce_plus_plus"):
        estimator({"use_kl_in_reward": True})
    with pytest.raises(ConfigError, match="use_kl_in_reward=true"):
        estimator(name="reinforce_plus_plus", kl_to_go=True)
    with pytest.raises(ConfigError, match="low <= 0 <= high"):
        estimator(clip=(0.5, 1.0))
    assert math.isfinite(estimator(clip=(-1.0, None)).compute_advantage(PROMPTS, REWARDS, MASK).sum())
