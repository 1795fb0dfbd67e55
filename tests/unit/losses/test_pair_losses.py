"""Every variant of DPO against its formula written out with `math`, pair by pair and token by token."""

import math

import pytest
import torch
from loss_batches import random_batch

from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.preference import VARIANTS, CentredMargin, DPOLossConfig, DPOLossFn, PreferenceLossFn
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

P, T, BETA, EPSILON, GAMMA = 3, 7, 0.3, 0.15, 0.4


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def make_loss(name, **options):
    defaults = {
        "reference_policy_kl_penalty": BETA,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.0,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
        "preference_loss": name,
        "label_smoothing": EPSILON,
        "target_margin": GAMMA,
    }
    return DPOLossFn(DPOLossConfig(**(defaults | options)))


def rows_of(logprobs, data):
    """Return per row: sum of log p, sum of log-ratios, number of tokens."""
    out = []
    for row in range(2 * P):
        tokens = [t for t in range(T - 1) if data["token_mask"][row, t + 1]]
        logp = sum(float(logprobs[row, t]) for t in tokens)
        ratio = sum(float(logprobs[row, t] - data["reference_policy_logprobs"][row, t + 1]) for t in tokens)
        out.append((logp, ratio, len(tokens)))
    return out


def log_odds(logp):
    return logp - math.log(1 - math.exp(logp))


def formula(name, chosen, rejected, sft_weight):
    """Return the loss of one pair, as in the variant's paper."""
    (logp_c, ratio_c, n_c), (logp_r, ratio_r, n_r) = chosen, rejected
    m = BETA * (ratio_c - ratio_r)
    nll = -logp_c / n_c
    match name:
        case "sigmoid":
            return -(1 - EPSILON) * log_sigmoid(m) - EPSILON * log_sigmoid(-m)
        case "robust":
            return (-(1 - EPSILON) * log_sigmoid(m) + EPSILON * log_sigmoid(-m)) / (1 - 2 * EPSILON)
        case "rpo":
            return -(1 - EPSILON) * log_sigmoid(m) - EPSILON * log_sigmoid(-m) + sft_weight * nll
        case "hinge":
            return max(0.0, 1 - m)
        case "ipo":
            return (ratio_c / n_c - ratio_r / n_r - 1 / (2 * BETA)) ** 2
        case "simpo":
            return -log_sigmoid(BETA * (logp_c / n_c - logp_r / n_r) - GAMMA)
        case "orpo":
            return sft_weight * nll - BETA * log_sigmoid(log_odds(logp_c / n_c) - log_odds(logp_r / n_r))
    raise AssertionError(name)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_equals_its_formula(name):
    weight = 0.7 if name in ("rpo", "orpo") else 0.0
    loss_fn = make_loss(name, sft_loss_weight=weight)
    logprobs, data = random_batch(2 * P, T, masked_rows=[2])

    def expected(values):
        rows = rows_of(values, data)
        return sum(formula(name, rows[2 * i], rows[2 * i + 1], weight) for i in (0, 2)) / 2

    leaf = logprobs.clone().requires_grad_(True)
    loss, _ = loss_fn(leaf, data=data, global_valid_seqs=4, global_valid_toks=0)
    loss.backward()
    assert loss.item() == pytest.approx(expected(logprobs), rel=1e-12)
    for row, token in ((0, 1), (1, 1), (2, 1), (4, 1), (5, 1)):
        step = torch.zeros_like(logprobs)
        step[row, token] = 1e-6
        slope = (expected(logprobs + step) - expected(logprobs - step)) / 2e-6
        assert leaf.grad[row, token].item() == pytest.approx(slope, abs=1e-8)
    assert leaf.grad[2:4].abs().max() == 0
    check_invariance(loss_fn, logprobs, data, rows_per_unit=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_without_tokens_keep_gradients_finite(name):
    """Filler rows have no unmasked token: their mean log-probability is 0 and their odds are infinite."""
    logprobs, data = random_batch(2 * P, T, masked_rows=[2])
    data["token_mask"][2:4] = 0
    data["sample_mask"][2:4] = 0
    leaf = logprobs.clone().requires_grad_(True)
    loss, metrics = make_loss(name, sft_loss_weight=1.0)(leaf, data=data, global_valid_seqs=4, global_valid_toks=0)
    loss.backward()
    assert torch.isfinite(leaf.grad).all() and math.isfinite(loss.item())
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_only_some_variants_need_a_reference():
    without = {name for name in VARIANTS if not make_loss(name).needs_reference}
    assert without == {"simpo", "orpo"}
    logprobs, data = random_batch(2 * P, T, masked_rows=[2])
    del data["reference_policy_logprobs"]
    make_loss("simpo")(logprobs, data=data, global_valid_seqs=4, global_valid_toks=0)


def test_without_smoothing_robust_is_sigmoid_and_starts_at_ln_2():
    logprobs, data = random_batch(2 * P, T, masked_rows=[2])
    data["reference_policy_logprobs"][:, 1:] = logprobs
    for name in ("sigmoid", "robust"):
        loss_fn = make_loss(name, label_smoothing=0.0)
        loss, _ = loss_fn(logprobs, data=data, global_valid_seqs=4, global_valid_toks=0)
        assert loss.item() == pytest.approx(math.log(2), rel=1e-15)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ConfigError, match="preference_loss='kto' is unknown; choose one of sigmoid"):
        make_loss("kto")


def test_a_margin_may_differ_for_each_pair():
    """Centring uses the scores without the margin; the offset of a DPO pair is arXiv 2402.10571, equation 5."""
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64)
    data = {"sample_mask": torch.ones(4), "margin": torch.tensor([0.25, 0.25, 3.0, 3.0])}
    loss_fn = PreferenceLossFn(CentredMargin(0.1, 0.2))
    loss, metrics = loss_fn(scores, data=data, global_valid_seqs=4)
    expected = (-log_sigmoid(0.5 - 0.35) + 0.2 * 1.5**2 - log_sigmoid(-3 - 3.1) + 0.2 * 1.0**2) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(metrics["rewards_margin_mean"]) == pytest.approx((0.5 - 3.0) / 2)
    check_invariance(loss_fn, scores, data, rows_per_unit=2)

    logprobs, pairs = random_batch(2 * P, T, masked_rows=[2])
    pairs["margin"] = torch.tensor([0.5, 0.5, 9.0, 9.0, 2.0, 2.0])
    loss_fn = make_loss("sigmoid", label_smoothing=0.0)
    loss, _ = loss_fn(logprobs, data=pairs, global_valid_seqs=4)
    rows = rows_of(logprobs, pairs)
    leads = [BETA * (rows[2 * i][1] - rows[2 * i + 1][1]) - float(pairs["margin"][2 * i]) for i in (0, 2)]
    assert loss.item() == pytest.approx(sum(-log_sigmoid(lead) for lead in leads) / 2, rel=1e-12)
    check_invariance(loss_fn, logprobs, pairs, rows_per_unit=2)


def test_the_reward_model_loss_applies_margin_and_centring():
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    data = {"sample_mask": torch.ones(4, dtype=torch.float64)}
    loss_fn = PreferenceLossFn(CentredMargin(0.25, 0.1))
    loss, metrics = loss_fn(scores[:, None], data=data, global_valid_seqs=4)
    expected = (-log_sigmoid(0.25) + 0.1 * 1.5**2 - log_sigmoid(-3.25) + 0.1 * 1.0**2) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(metrics["rewards_margin_mean"]) == pytest.approx((0.5 - 3.0) / 2)
    check_invariance(loss_fn, scores.detach()[:, None], data, rows_per_unit=2)
