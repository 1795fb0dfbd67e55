"""Metrics and weights of the policy-gradient loss, computed by hand in float64.

One line of arithmetic for each number; the losses themselves are in `test_policy_gradient`.
"""

import math

import pytest
import torch

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import extreme_of
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.policy.workers.loss_calls import join_updates, mean_weight

pytestmark = pytest.mark.fast

GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CORRECTED = {"use_importance_sampling_correction": True}
ICEPOP = CORRECTED | {
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio_min": 0.95,
    "truncated_importance_sampling_ratio": 1.05,
}
TIS = CORRECTED | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 0.8}
SEQ_MASK = ICEPOP | {"truncated_importance_sampling_type": "seq-mask-tis"}


def batch_of(differences, token_mask=None, sample_mask=None, dtype=torch.float64, **columns):
    """Make a batch from the given `log prev - log engine`; the engine's log-probabilities are -1."""
    differences = torch.tensor(differences, dtype=dtype)
    rows, width = differences.shape
    engine = torch.full((rows, width + 1), -1.0, dtype=dtype)
    prev = engine.clone()
    prev[:, 1:] += differences
    mask = torch.ones(rows, width, dtype=dtype) if token_mask is None else torch.tensor(token_mask, dtype=dtype)
    return prev[:, 1:].clone(), {
        "advantages": torch.ones(rows, width + 1, dtype=dtype),
        "prev_logprobs": prev,
        "generation_logprobs": engine,
        "token_mask": torch.cat([torch.zeros(rows, 1, dtype=dtype), mask], dim=1),
        "sample_mask": torch.ones(rows, dtype=dtype) if sample_mask is None else torch.tensor(sample_mask, dtype=dtype),
        **columns,
    }


def run(logprobs, data, **options):
    cfg = ClippedPGLossConfig.build(**({"reference_policy_kl_penalty": 0.0} | options))
    seqs = float(data["sample_mask"].sum())
    toks = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    loss, metrics = ClippedPGLossFn(cfg)(logprobs, data=data, global_valid_seqs=seqs, global_valid_toks=toks)
    return float(loss), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(("nats", "share"), [(0.1, 1.0025), (0.2, 1.0100), (2.5, 3.0365)])
def test_js_divergence_error_is_k3_relative_to_the_mixture(nats, share):
    """`(p/m - 1 - log p/m + g/m - 1 - log g/m) / 2`; the other direction is larger by this factor."""
    p, g = math.exp(-1 + nats), math.exp(-1)
    m = (p + g) / 2
    _, metrics = run(*batch_of([[nats]]))
    by_hand = (p / m - 1 - math.log(p / m) + g / m - 1 - math.log(g / m)) / 2
    assert metrics["js_divergence_error"] == pytest.approx(by_hand, rel=1e-9)
    other_direction = (m / p - 1 - math.log(m / p) + m / g - 1 - math.log(m / g)) / 2
    assert other_direction / by_hand == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_errors_follow_the_estimator_of_the_kl_term(kind):
    """Differences log p - log g of 0.3 and -0.2; with k1 an error may be negative."""
    _, metrics = run(*batch_of([[0.3, -0.2]]), reference_policy_kl_type=kind)
    of = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    assert metrics["gen_kl_error"] == pytest.approx((of(0.3) + of(-0.2)) / 2, rel=1e-9)
    assert metrics["policy_kl_error"] == pytest.approx((of(-0.3) + of(0.2)) / 2, rel=1e-9)
    if kind == "k1":
        assert metrics["gen_kl_error"] == pytest.approx(-0.05)
    _, plain = run(*batch_of([[0.3, -0.2]]))
    assert metrics["js_divergence_error"] == plain["js_divergence_error"]


def test_importance_weights_are_not_clipped():
    """A log-ratio of 23.5 gives 33 times the weight of one clipped at 20."""
    loss, metrics = run(*batch_of([[23.5, 0.0]]), **CORRECTED)
    assert loss == pytest.approx(-(math.exp(23.5) + 1) / 2, rel=1e-12)
    assert metrics["sampling_importance_ratio"] == pytest.approx((math.exp(23.5) + 1) / 2, rel=1e-12)
    assert metrics["token_mult_prob_error"] == pytest.approx((math.exp(23.5) + 1) / 2, rel=1e-12)
    assert metrics["gen_kl_error"] == pytest.approx((math.exp(23.5) - 1 - 23.5) / 2, rel=1e-12)
    assert metrics["policy_kl_error"] == pytest.approx((math.exp(-23.5) - 1 + 23.5) / 2, rel=1e-12)
    assert metrics["approx_entropy"] == pytest.approx(-(math.exp(23.5) * 22.5 + 1 * -1) / 2, rel=1e-12)
    assert math.exp(23.5) / math.exp(20) == pytest.approx(33.1, abs=0.1)


def test_the_weight_of_a_sequence_is_not_clipped():
    loss, metrics = run(*batch_of([[12.0, 11.5]]), **GSPO, **CORRECTED)
    assert loss == pytest.approx(-math.exp(23.5), rel=1e-12)
    assert metrics["sampling_importance_ratio"] == pytest.approx(math.exp(23.5), rel=1e-12)


@pytest.mark.parametrize("options", [CORRECTED, GSPO | CORRECTED])
def test_an_overflowing_weight_becomes_zero(options):
    """e^89 overflows float32: the token (with GSPO its sequence) has no gradient; the error metrics show it."""
    logprobs, data = batch_of([[89.0, 0.0], [0.0, 0.0]], dtype=torch.float32)
    leaf = logprobs.requires_grad_(True)
    cfg = ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0, **options)
    loss, metrics = ClippedPGLossFn(cfg)(leaf, data=data, global_valid_seqs=2.0, global_valid_toks=4.0)
    loss.backward()
    lost = 2 if "sequence_level_importance_ratios" in options else 1
    assert float(metrics["sampling_importance_ratio"]) == pytest.approx((4 - lost) / 4)
    assert loss.item() == pytest.approx(-(4 - lost) / 4)
    assert leaf.grad[0, 0] == 0 and torch.isfinite(leaf.grad).all()
    assert float(metrics["token_mult_prob_error"]) == math.inf


def test_an_overflowing_bounded_weight_gets_its_bound():
    logprobs, data = batch_of([[89.0, 0.0]], dtype=torch.float32)
    loss, metrics = run(logprobs, data, **(TIS | {"truncated_importance_sampling_ratio": 2.0}))
    assert (loss, metrics["is_oob_ratio"]) == (pytest.approx(-(2.0 + 1.0) / 2), 0.5)
    loss, _ = run(logprobs, data, **ICEPOP)
    assert loss == pytest.approx(-(0.0 + 1.0) / 2)


def test_the_sampling_ratio_is_measured_after_truncation():
    """Weights e^0.1 = 1.105, e^0.02 = 1.020 and e^-0.3 = 0.741 in the band from 0.95 to 1.05."""
    differences = [[0.1, 0.02, -0.3]]
    _, raw = run(*batch_of(differences))
    assert raw["sampling_importance_ratio"] == pytest.approx((math.exp(0.1) + math.exp(0.02) + math.exp(-0.3)) / 3)
    assert raw["is_oob_ratio"] == 0.0
    _, icepop = run(*batch_of(differences), **ICEPOP)
    assert icepop["sampling_importance_ratio"] == pytest.approx((0 + math.exp(0.02) + 0) / 3)
    assert icepop["is_oob_ratio"] == pytest.approx(2 / 3)
    _, tis = run(*batch_of(differences), **TIS)
    assert tis["sampling_importance_ratio"] == pytest.approx((0.8 + 0.8 + math.exp(-0.3)) / 3)
    assert tis["is_oob_ratio"] == pytest.approx(2 / 3)
    # The geometric mean is e^-0.06 = 0.942: the sequence is dropped.
    _, masked = run(*batch_of(differences), **SEQ_MASK)
    assert (masked["sampling_importance_ratio"], masked["is_oob_ratio"]) == (0.0, 1.0)


def test_gspo_counts_sequence_weights_by_sequence_and_their_bounds_by_token():
    """A sequence of three tokens with weight e^0.3, out of bounds, and one of a token with e^-0.4."""
    data = batch_of([[0.1, 0.1, 0.1], [-0.4, 0.0, 0.0]], token_mask=[[1, 1, 1], [1, 0, 0]])
    _, metrics = run(*data, **GSPO, **TIS)
    assert metrics["sampling_importance_ratio"] == pytest.approx((0.8 + math.exp(-0.4)) / 2)
    assert metrics["is_oob_ratio"] == pytest.approx(3 / 4)
    _, untruncated = run(*data, **GSPO)
    assert untruncated["sampling_importance_ratio"] == pytest.approx((math.exp(0.3) + math.exp(-0.4)) / 2)


def test_probs_ratio_is_reported_without_the_ppo_ratio_too():
    """NeMo RL reports the mean log-probability under this name."""
    logprobs, data = batch_of([[0.0, 0.0]])
    now = logprobs + torch.tensor([[0.2, -0.1]], dtype=torch.float64)
    _, metrics = run(now, data, disable_ppo_ratio=True)
    assert metrics["probs_ratio"] == pytest.approx((math.exp(0.2) + math.exp(-0.1)) / 2)
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == pytest.approx((math.exp(-0.1), math.exp(0.2)))


def test_sequence_errors_skip_samples_without_a_counted_token():
    """Rows: e^0.5 and 1; e^0.2; no token; masked. Only the update knows it is on-policy, so the loss reports it."""
    logprobs, data = batch_of(
        [[0.5, 0.0], [-0.2, 0.7], [0.9, 0.9], [3.0, 3.0]],
        token_mask=[[1, 1], [1, 0], [0, 0], [1, 1]],
        sample_mask=[1, 1, 1, 0],
        num_counted_samples=torch.full((4,), 2.0, dtype=torch.float64),
    )
    _, with_prev = run(logprobs, data)
    assert not any("seq_mult_prob_error" in name for name in with_prev)  # `PolicyScoring` reports it
    del data["prev_logprobs"]
    _, metrics = run(logprobs, data)
    first, second = (math.exp(0.5) + 1) / 2, math.exp(0.2)
    for suffix in ("", "_after_mask"):
        assert metrics[f"max_seq_mult_prob_error{suffix}"] == pytest.approx(first)
        assert metrics[f"min_seq_mult_prob_error{suffix}"] == pytest.approx(second)
        assert metrics[f"mean_seq_mult_prob_error{suffix}"] == pytest.approx((first + second) / 2)
    check_invariance(ClippedPGLossFn(ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0)), logprobs, data)


def test_positive_nll_equals_a_hand_computed_case():
    """Rows of two and one tokens with p = e^-1; the second one has a positive reward, the third is masked."""
    logprobs, data = batch_of(
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        token_mask=[[1, 1], [1, 0], [1, 1]],
        sample_mask=[1, 1, 0],
        positive_examples=torch.tensor([0.0, 1.0, 1.0]),
    )
    plain, _ = run(logprobs, data)
    loss, metrics = run(logprobs, data, positive_example_nll_weight=0.5)
    assert metrics["positive_nll_loss"] == pytest.approx(1.0 / 3)  # one token of three unmasked ones
    assert loss == pytest.approx(plain + 0.5 / 3)
    loss, metrics = run(logprobs, data, positive_example_nll_weight=0.5, token_level_loss=False)
    assert metrics["positive_nll_loss"] == pytest.approx((0 + 1.0) / 2)  # means over answers
    del data["positive_examples"]
    data["advantages"] = -data["advantages"]
    _, metrics = run(logprobs, data, positive_example_nll_weight=0.5)
    assert metrics["positive_nll_loss"] == 0.0
    _, metrics = run(logprobs, data)
    assert "positive_nll_loss" not in metrics


def test_positive_nll_has_the_gradient_of_the_likelihood_on_positive_answers_alone():
    logprobs, data = batch_of([[0.0, 0.0], [0.0, 0.0]], positive_examples=torch.tensor([1.0, 0.0]))
    data["advantages"] = torch.zeros_like(data["advantages"])
    leaf = logprobs.requires_grad_(True)
    cfg = ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0, positive_example_nll_weight=0.4)
    loss, _ = ClippedPGLossFn(cfg)(leaf, data=data, global_valid_seqs=2.0, global_valid_toks=4.0)
    loss.backward()
    assert leaf.grad.tolist() == [[-0.4 / 4, -0.4 / 4], [0.0, 0.0]]
    check_invariance(ClippedPGLossFn(cfg), logprobs.detach(), data)


def test_forced_on_policy_ratios_are_per_token_with_gspo_too():
    """Advantages 1 and -1 in one answer: each token has its own gradient; one mean ratio would give none."""
    logprobs, data = batch_of([[0.0, 0.0]])
    data["advantages"] = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64)
    leaf = logprobs.requires_grad_(True)
    cfg = ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0, force_on_policy_ratio=True, **GSPO)
    loss, _ = ClippedPGLossFn(cfg)(leaf, data=data, global_valid_seqs=1.0, global_valid_toks=2.0)
    loss.backward()
    assert leaf.grad.tolist() == [[-0.5, 0.5]]


def test_metrics_of_updates_are_joined_by_their_denominators():
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig.build(**GSPO, **TIS))
    over_sequences = {"loss", "kl_penalty", "sampling_importance_ratio"}
    for name in (*over_sequences, "is_oob_ratio", "probs_ratio", "gen_kl_error"):
        weight = "global_valid_seqs" if name in over_sequences else "global_valid_toks"
        assert mean_weight(name, loss_fn) == weight
    assert mean_weight("is_oob_ratio", ClippedPGLossFn(ClippedPGLossConfig.build(**SEQ_MASK))) == "global_valid_seqs"
    updates = [
        {"sampling_importance_ratio": 1.0, "global_valid_seqs": 1.0, "global_valid_toks": 30.0},
        {"sampling_importance_ratio": 4.0, "global_valid_seqs": 2.0, "global_valid_toks": 10.0},
    ]
    assert join_updates(updates, loss_fn)["sampling_importance_ratio"] == pytest.approx((1 * 1 + 2 * 4) / 3)


def test_metric_names_tell_which_extreme_they_are():
    assert [extreme_of(name) for name in ("ratio_min", "min_error", "ratio_max", "max_error")] == [min, min, max, max]
    assert extreme_of("mean_seq_mult_prob_error") is None and extreme_of("maximum") is None
