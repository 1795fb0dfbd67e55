"""Masked reductions against NumPy, KL estimators by hand and by their defining properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.divergence import calculate_kl
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.reductions import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    masked_var,
    safe_divide,
)
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

VALUES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)


def test_masked_mean_equals_a_hand_computed_case():
    assert masked_sum(VALUES, MASK).item() == 21
    assert masked_mean(VALUES, MASK).item() == 7
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [2.5, 16.0]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [1.0, 16.0, 4.0]
    assert masked_mean(VALUES, MASK, global_normalization_factor=42).item() == 0.5
    by_row = masked_mean(VALUES, MASK, dim=1, global_normalization_factor=torch.tensor(2.0))
    assert by_row.tolist() == [2.5, 8.0]


def test_masked_var_equals_a_hand_computed_case():
    kept = [1.0, 4.0, 16.0]
    assert masked_var(VALUES, MASK).item() == pytest.approx(np.var(kept, ddof=1))
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(np.var(kept))
    about_zero = masked_var(VALUES, MASK, mean=0.0, unbiased=False).item()
    assert about_zero == pytest.approx(np.mean(np.square(kept)))


def test_masked_extremes_ignore_masked_values():
    assert (masked_min(VALUES, MASK).item(), masked_max(VALUES, MASK).item()) == (1, 16)
    nothing = torch.zeros_like(MASK)
    assert masked_min(VALUES, nothing).item() == math.inf
    assert masked_max(VALUES, nothing).item() == -math.inf


def test_reductions_over_empty_masks_are_zero():
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing).item() == 0
    assert masked_mean(VALUES, nothing, dim=-1).tolist() == [0, 0]
    assert masked_mean(VALUES, nothing, global_normalization_factor=0).item() == 0
    assert masked_var(VALUES, nothing).item() == 0
    one = nothing.clone()
    one[0, 1] = 1
    assert masked_var(VALUES, one).item() == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_nan_and_inf_change_neither_value_nor_gradient(garbage):
    values = torch.where(MASK == 0, garbage, VALUES).requires_grad_(True)
    mean = masked_mean(values, MASK)
    mean.backward()
    assert mean.item() == 7
    torch.testing.assert_close(values.grad, MASK / 3)


def test_safe_divide_is_exact_and_has_finite_gradients():
    numerator = torch.tensor([3.0, 5.0], requires_grad=True)
    quotient = safe_divide(numerator, torch.tensor([7.0, 0.0]))
    quotient.sum().backward()
    assert quotient.tolist() == [float(np.float32(3) / np.float32(7)), 0.0]
    assert numerator.grad.tolist() == [float(np.float32(1) / np.float32(7)), 0.0]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000))
def test_means_with_a_global_factor_add_up(num_rows, cut, seed):
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, 3, generator=gen, dtype=torch.float64)
    mask = (torch.rand(num_rows, 3, generator=gen) < 0.5).double()
    total = mask.sum()
    parts = [
        masked_mean(v, m, global_normalization_factor=total)
        for v, m in [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
        if len(v)
    ]
    assert sum(parts).item() == pytest.approx(masked_mean(values, mask).item(), abs=1e-12)


def test_kl_estimators_equal_hand_computed_cases():
    policy = torch.tensor([math.log(0.5)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25)], dtype=torch.float64)
    log2 = math.log(2)
    for kind, value in {"k1": log2, "k2": log2**2 / 2, "k3": 0.5 - 1 + log2}.items():
        assert calculate_kl(policy, reference, kind).item() == pytest.approx(value, rel=1e-14)


def categorical(seed=0, size=9):
    """Return the logits of a policy, its log-probabilities and those of a reference, all `[size]`."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=gen, dtype=torch.float64).requires_grad_(True)
    reference = torch.randn(size, generator=gen, dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    """Exact expectations over a small vocabulary instead of samples."""
    _, policy, reference = categorical()
    true_kl = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * calculate_kl(policy, reference, kind, output_clamp_value=None)).sum()
    assert estimate.item() == pytest.approx(true_kl.item(), rel=1e-12)


def expected_gradient(kind, engine_seed, **options):
    """Return the exact expectation, over an engine's samples, of the gradient of the loss's KL term, `[size]`.

    Every token of the vocabulary is a separate row, weighted by the probability that the engine draws it. Without a
    seed the engine is the policy.
    """
    logits, policy, reference = categorical()
    engine = policy.detach() if engine_seed is None else categorical(engine_seed)[1].detach()
    fixed = {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": None, "kl_output_clamp_value": None}
    cfg = ClippedPGLossConfig.build(reference_policy_kl_type=kind, **fixed, **options)

    def second_column(values):
        return torch.stack([torch.zeros_like(values), values], dim=1)

    data = {
        "advantages": torch.zeros(len(policy), 2, dtype=torch.float64),
        "generation_logprobs": second_column(engine),
        "reference_policy_logprobs": second_column(reference),
        "token_mask": torch.ones(len(policy), 2, dtype=torch.float64),
        "sample_mask": engine.exp(),
    }
    loss, _ = ClippedPGLossFn(cfg)(policy[:, None], data=data, global_valid_seqs=1.0, global_valid_toks=1.0)
    return torch.autograd.grad(loss, logits)[0]


ON_POLICY = {"on_policy": (None, False), "on_policy_weighted": (None, True), "other_engine": (1, True)}


@pytest.mark.parametrize("case", ON_POLICY)
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_loss_has_the_gradient_of_the_true_kl(kind, case):
    engine_seed, weighted = ON_POLICY[case]
    gradient = expected_gradient(kind, engine_seed, use_on_policy_kl_approximation=weighted)
    logits, policy, reference = categorical()
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ON_POLICY)
def test_k2_has_the_gradient_of_half_the_mean_square(case):
    """`d E_p[(log r)^2] / 2`: the direction of the KL's gradient, about twice its length."""
    engine_seed, weighted = ON_POLICY[case]
    gradient = expected_gradient("k2", engine_seed, use_on_policy_kl_approximation=weighted)
    logits, policy, reference = categorical()
    (want,) = torch.autograd.grad((policy.exp() * (policy - reference) ** 2).sum() / 2, logits, retain_graph=True)
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-12)
    assert 1.5 < gradient.norm() / true_gradient.norm() < 3


def test_the_estimators_alone_have_only_part_of_the_gradient():
    logits, policy, reference = categorical()
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for kind, want in (("k1", torch.zeros_like(true_gradient)), ("k2", true_gradient)):
        sampled = (policy.exp().detach() * calculate_kl(policy, reference, kind, output_clamp_value=None)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-12)


def test_importance_weights_make_the_estimate_on_policy():
    gen = torch.Generator().manual_seed(1)
    policy, reference, behaviour = torch.randn(3, 9, generator=gen, dtype=torch.float64).log_softmax(-1)
    weights = (policy - behaviour).exp()
    estimate = behaviour.exp() * calculate_kl(policy, reference, "k3", importance_sampling_weights=weights)
    true_kl = (policy.exp() * (policy - reference)).sum()
    assert estimate.sum().item() == pytest.approx(true_kl.item(), rel=1e-12)


def test_weights_multiply_before_the_output_clamp():
    """Beyond a clamp, of the estimate or of the log-ratio, the gradient is zero; the values are the same."""
    policy = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([0.5, 3.0, 3.0, 3.0], dtype=torch.float64) * policy.exp()
    reference = torch.tensor([-1.5, -1.5, -9.0, 9.0], dtype=torch.float64)
    kl = calculate_kl(policy, reference, "k1", 2.0, 5.0, weights)
    assert kl.tolist() == [0.75, 4.5, 5.0, -5.0]
    kl.sum().backward()
    assert policy.grad.tolist() == [0.5 * (1 + 1.5), 3 * (1 + 1.5), 0, 0]
    policy.grad = None
    kl = calculate_kl(policy, reference, "k1", 2.0, None, weights.detach() * policy.exp())
    kl.sum().backward()
    assert kl.tolist() == [0.75, 4.5, 6.0, -6.0]
    assert policy.grad.tolist() == [0.5 * (1 + 1.5), 3 * (1 + 1.5), 0, 0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_log_ratio_beyond_its_clamp_has_no_gradient_in_the_loss(kind):
    """Without an output clamp; the token within the clamp keeps the whole gradient of its weighted estimate."""
    cfg = ClippedPGLossConfig.build(
        reference_policy_kl_type=kind,
        reference_policy_kl_penalty=1.0,
        kl_input_clamp_value=1.0,
        kl_output_clamp_value=None,
    )
    policy = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    data = {
        "advantages": torch.zeros(1, 3, dtype=torch.float64),
        "generation_logprobs": torch.tensor([[0.0, -1.0, -1.0]], dtype=torch.float64),
        "reference_policy_logprobs": torch.tensor([[0.0, -1.6, -6.0]], dtype=torch.float64),
        "token_mask": torch.tensor([[0.0, 1, 1]], dtype=torch.float64),
        "sample_mask": torch.ones(1, dtype=torch.float64),
    }
    loss, metrics = ClippedPGLossFn(cfg)(policy, data=data, global_valid_seqs=1.0, global_valid_toks=2.0)
    loss.backward()

    def estimate(x):
        return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]

    assert float(metrics["kl_penalty"]) == pytest.approx((estimate(-0.6) + estimate(-1.0)) / 2, rel=1e-12)
    slope = {"k1": 1.0, "k2": 0.6, "k3": 1 - math.exp(-0.6)}[kind]  # of the estimate; its weight adds its value
    expected = [(slope + estimate(-0.6)) / 2, 0.0]
    assert policy.grad.tolist()[0] == pytest.approx(expected, rel=1e-12)


def test_clamps_of_zero_remove_the_kl_term():
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0], dtype=torch.float64)
    for clamps in ((0.0, None), (None, 0.0)):
        kl = calculate_kl(policy, reference, "k3", *clamps, importance_sampling_weights=policy.exp())
        kl.sum().backward()
        assert kl.item() == 0 and policy.grad.item() == 0


def test_kl_clamps_bound_input_and_output():
    policy = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([50.0, -50.0, 1.0], dtype=torch.float64)
    kl = calculate_kl(policy, reference, "k3", input_clamp_value=3.0, output_clamp_value=None)
    expected = [math.exp(3) - 4, math.exp(-3) + 2, math.e - 2]
    assert kl.tolist() == pytest.approx(expected, rel=1e-14)
    kl.sum().backward()
    assert policy.grad.tolist() == pytest.approx([0, 0, 1 - math.e], rel=1e-14)
    limited = calculate_kl(policy, reference, "k1", input_clamp_value=None, output_clamp_value=10.0)
    assert limited.tolist() == [-10, 10, -1]
    default = calculate_kl(policy, reference)
    assert default.tolist() == pytest.approx([10, 10, math.e - 2])


@settings(max_examples=100, deadline=None)
@given(st.floats(-60, 0), st.floats(-60, 0))
def test_k2_and_k3_are_never_negative(policy, reference):
    for kind in ("k2", "k3"):
        kl = calculate_kl(torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), kind)
        assert 0 <= kl.item() <= 10


def test_an_unknown_kl_estimator_is_refused():
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        calculate_kl(torch.zeros(1), torch.zeros(1), "k4")
