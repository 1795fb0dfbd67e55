"""NLL, reward-model and DPO losses against loops over floats and closed-form gradients."""

import math

import pytest
import torch
from loss_batches import denominators, random_batch

from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLossFn
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

P, T = 4, 6
BETA = 0.3


def make_pairs(seed=0):
    """Make eight interleaved rows; the third pair is masked."""
    return random_batch(2 * P, T, seed=seed, masked_rows=[4, 5])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_nll_equals_a_loop_and_its_closed_form_gradient():
    logprobs, data = make_pairs()
    leaf = logprobs.clone().requires_grad_(True)
    loss, metrics = NLLLossFn()(leaf, data=data, **denominators(data))
    loss.backward()
    picked = [
        (b, t) for b in range(2 * P) for t in range(T - 1) if data["token_mask"][b, t + 1] and data["sample_mask"][b]
    ]
    assert loss.item() == pytest.approx(-sum(float(logprobs[b, t]) for b, t in picked) / len(picked))
    expected = torch.zeros_like(logprobs)
    for b, t in picked:
        expected[b, t] = -1 / len(picked)
    torch.testing.assert_close(leaf.grad, expected)
    assert float(metrics["num_unmasked_tokens"]) == len(picked)
    assert float(metrics["num_valid_samples"]) == 6
    assert float(metrics["loss"]) == loss.item()
    check_invariance(NLLLossFn(), logprobs, data)


def test_nll_of_an_impossible_token_is_infinite():
    logprobs, data = make_pairs()
    logprobs[0, 1] = -torch.inf
    assert NLLLossFn()(logprobs, data=data, **denominators(data))[0].item() == math.inf


@pytest.mark.parametrize("shape", [(2 * P,), (2 * P, 1)])
def test_the_preference_loss_equals_a_loop(shape):
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0, 9.0, 0.0, 3.0, 3.0], dtype=torch.float64)
    data = {"sample_mask": torch.tensor([1, 1, 1, 1, 0, 0, 1, 1], dtype=torch.float64)}
    leaf = scores.clone().reshape(shape).requires_grad_(True)
    loss, metrics = PreferenceLossFn()(leaf, data=data, global_valid_seqs=6)
    loss.backward()
    margins = {0: 0.5, 1: -3.0, 3: 0.0}
    assert loss.item() == pytest.approx(-sum(math.log(sigmoid(m)) for m in margins.values()) / 3)
    expected = torch.zeros(2 * P, dtype=torch.float64)
    for pair, margin in margins.items():
        expected[2 * pair] = -sigmoid(-margin) / 3
        expected[2 * pair + 1] = sigmoid(-margin) / 3
    torch.testing.assert_close(leaf.grad.flatten(), expected)
    assert float(metrics["accuracy"]) == pytest.approx(1 / 3)
    assert float(metrics["rewards_chosen_mean"]) == pytest.approx((1 - 1 + 3) / 3)
    assert float(metrics["rewards_rejected_mean"]) == pytest.approx((0.5 + 2 + 3) / 3)
    assert float(metrics["num_valid_samples"]) == 3
    check_invariance(PreferenceLossFn(), scores.reshape(shape), data, rows_per_unit=2)


def make_dpo(**options):
    defaults = {
        "reference_policy_kl_penalty": BETA,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.0,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
    }
    return DPOLossFn(DPOLossConfig(**(defaults | options)))


def reference_dpo(logprobs, data, cfg):
    """Return (loss, preference loss, SFT loss, gradient, rewards) from the formulas, pair by pair."""
    gradient = torch.zeros_like(logprobs)
    pairs = [i for i in range(P) if data["sample_mask"][2 * i]]
    preference = sft = 0.0
    rewards = {}
    for i in pairs:
        tokens, counts = {}, {}
        for row in (2 * i, 2 * i + 1):
            tokens[row] = [t for t in range(T - 1) if data["token_mask"][row, t + 1]]
            counts[row] = len(tokens[row]) if cfg.preference_average_log_probs else 1
            rewards[row] = cfg.reference_policy_kl_penalty * sum(
                float(logprobs[row, t] - data["reference_policy_logprobs"][row, t + 1]) / counts[row]
                for t in tokens[row]
            )
        margin = rewards[2 * i] - rewards[2 * i + 1]
        preference -= math.log(sigmoid(margin)) / len(pairs)
        for row, sign in ((2 * i, -1), (2 * i + 1, 1)):
            pull = sign * sigmoid(-margin) * cfg.reference_policy_kl_penalty / counts[row]
            for t in tokens[row]:
                gradient[row, t] += cfg.preference_loss_weight * pull / len(pairs)
        count = len(tokens[2 * i]) if cfg.sft_average_log_probs else 1
        for t in tokens[2 * i]:
            sft -= float(logprobs[2 * i, t]) / count / len(pairs)
            gradient[2 * i, t] -= cfg.sft_loss_weight / count / len(pairs)
    loss = cfg.preference_loss_weight * preference + cfg.sft_loss_weight * sft
    return loss, preference, sft, gradient, rewards


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preference_average_log_probs": True},
        {"sft_loss_weight": 0.4},
        {"sft_loss_weight": 0.4, "sft_average_log_probs": True, "preference_loss_weight": 2.5},
        {"reference_policy_kl_penalty": 2.0},
    ],
)
def test_dpo_equals_the_reference(options):
    loss_fn = make_dpo(**options)
    logprobs, data = make_pairs()
    leaf = logprobs.clone().requires_grad_(True)
    loss, metrics = loss_fn(leaf, data=data, **denominators(data))
    loss.backward()
    expected, preference, sft, gradient, rewards = reference_dpo(logprobs, data, loss_fn.cfg)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(leaf.grad, gradient)
    beta = loss_fn.cfg.reference_policy_kl_penalty
    chosen = [rewards[row] / beta for row in rewards if row % 2 == 0]
    rejected = [rewards[row] / beta for row in rewards if row % 2 == 1]
    wins = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    expected_metrics = {
        "loss": expected,
        "preference_loss": preference,
        "sft_loss": sft if loss_fn.cfg.sft_loss_weight else 0.0,
        "accuracy": wins / 3,
        "rewards_chosen_mean": sum(chosen) / 3,
        "rewards_rejected_mean": sum(rejected) / 3,
        "rewards_margin_mean": (sum(chosen) - sum(rejected)) / 3,
        "num_valid_samples": 3,
    }
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(expected_metrics, rel=1e-12)
    check_invariance(loss_fn, logprobs, data, rows_per_unit=2)


def test_dpo_metrics_equal_a_hand_computed_case():
    """Log-ratios of 0.5 + 0.2 for the chosen and of -0.4 for the rejected answer; beta is in the loss alone."""
    policy = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=torch.float64)
    data = {
        "reference_policy_logprobs": torch.tensor([[0.0, -1.5, -2.2], [0.0, -2.6, -1.0]], dtype=torch.float64),
        "token_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]], dtype=torch.float64),
        "sample_mask": torch.ones(2, dtype=torch.float64),
    }
    _, metrics = make_dpo()(policy, data=data, **denominators(data))
    assert float(metrics["rewards_chosen_mean"]) == pytest.approx(0.7, rel=1e-12)
    assert float(metrics["rewards_rejected_mean"]) == pytest.approx(-0.4, rel=1e-12)
    assert float(metrics["rewards_margin_mean"]) == pytest.approx(1.1, rel=1e-12)
    assert float(metrics["preference_loss"]) == pytest.approx(-math.log(sigmoid(BETA * 1.1)), rel=1e-12)
    assert float(metrics["sft_loss"]) == 0.0
    _, metrics = make_dpo(sft_loss_weight=0.5)(policy, data=data, **denominators(data))
    assert float(metrics["sft_loss"]) == pytest.approx(1.0 + 2.0, rel=1e-12)  # before its weight


def test_dpo_starts_at_ln_2():
    logprobs, data = make_pairs()
    data["reference_policy_logprobs"][:, 1:] = logprobs
    loss, metrics = make_dpo()(logprobs, data=data, **denominators(data))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-15)
    assert float(metrics["accuracy"]) == 0  # a tie is no win


def test_dpo_accepts_another_pair_loss():
    """A hinge loss in one line shows the hook."""
    logprobs, data = make_pairs()
    cfg = make_dpo().cfg
    hinge = DPOLossFn(cfg, pair_loss=lambda chosen, rejected: (1 - (chosen - rejected)).relu())
    loss, _ = hinge(logprobs, data=data, **denominators(data))
    rewards = reference_dpo(logprobs, data, cfg)[-1]
    expected = [max(0.0, 1 - (rewards[2 * i] - rewards[2 * i + 1])) for i in (0, 1, 3)]
    assert loss.item() == pytest.approx(sum(expected) / 3)


def test_nan_in_a_masked_pair_is_never_read():
    logprobs, data = make_pairs()
    expected, _ = make_dpo(sft_loss_weight=0.5)(logprobs, data=data, **denominators(data))
    logprobs[4:6] = torch.nan
    leaf = logprobs.requires_grad_(True)
    loss, _ = make_dpo(sft_loss_weight=0.5)(leaf, data=data, **denominators(data))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-15)
    assert torch.isfinite(leaf.grad).all()


def test_an_odd_number_of_rows_is_refused():
    with pytest.raises(DataError, match="even; got 3"):
        PreferenceLossFn()(torch.zeros(3), data={"sample_mask": torch.ones(3)}, global_valid_seqs=3)
