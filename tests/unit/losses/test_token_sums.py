"""Losses of the training service: values and gradients by hand, and inputs that cannot be used."""

import math

import numpy as np
import pytest
import torch

from nemo_rl.losses.token_sums import LOSSES, check_loss, check_loss_inputs, loss_terms
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
RATIOS = [1.0, 0.5, 2.0, 1.0, 0.5, 2.0]
ADVANTAGES = [3.0, 3.0, 3.0, -3.0, -3.0, -3.0]


def of_ratios(name: str, settings: dict[str, float]) -> tuple[list[float], list[float]]:
    """Return the loss of each of six tokens, and its gradient in x, for the ratios and advantages above."""
    q = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.25, -3.0], dtype=torch.float64)
    x = (q + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    given = {"logprobs": q, "advantages": torch.tensor(ADVANTAGES), "sequence_ratio_mask": torch.ones(6)}
    inputs = {key: value.view(1, 6, 1) for key, value in given.items()}
    terms = loss_terms(name, x.view(1, 6, 1), inputs, settings)
    terms.sum().backward()
    return terms.flatten().tolist(), x.grad.tolist()


def test_importance_sampling_weights_by_the_ratio():
    """-r A, whose gradient is -r A too."""
    values, gradients = of_ratios("importance_sampling", {})
    assert values == pytest.approx([-3.0, -1.5, -6.0, 3.0, 1.5, 6.0])
    assert gradients == pytest.approx(values)


def test_ppo_takes_the_lower_objective():
    """Inside the range, and where clipping would be the better one: -r A. Otherwise the bound, without gradient."""
    values, gradients = of_ratios("ppo", CLIP)
    assert values == pytest.approx([-3.0, -1.5, -3.6, 3.0, 2.4, 6.0])
    assert gradients == pytest.approx([-3.0, -1.5, 0.0, 3.0, 0.0, 6.0])


def test_cispo_keeps_a_gradient_outside_the_range():
    values, gradients = of_ratios("cispo", CLIP)
    x = [q + math.log(r) for q, r in zip([-1.0, -2.0, -0.5, -1.5, -0.25, -3.0], RATIOS, strict=True)]
    clipped = [1.0, 0.8, 1.2, 1.0, 0.8, 1.2]
    assert values == pytest.approx([-c * a * v for c, a, v in zip(clipped, ADVANTAGES, x, strict=True)])
    assert gradients == pytest.approx([-c * a for c, a in zip(clipped, ADVANTAGES, strict=True)])


def test_dro_has_a_quadratic_penalty():
    """-(x A - beta/2 (x-q)^2): the gradient is -A + beta (x - q)."""
    values, gradients = of_ratios("dro", {"beta": 0.1})
    q = [-1.0, -2.0, -0.5, -1.5, -0.25, -3.0]
    logs = [math.log(r) for r in RATIOS]
    expected = [-((b + d) * a - 0.05 * d * d) for a, b, d in zip(ADVANTAGES, q, logs, strict=True)]
    assert values == pytest.approx(expected)
    assert gradients == pytest.approx([-a + 0.1 * d for a, d in zip(ADVANTAGES, logs, strict=True)])


def test_gspo_uses_one_ratio_for_a_response():
    """s = exp of the mean of log(2), log(8) and log(1/2) under the mask, and its gradient is that of each token."""
    q = torch.full((1, 4, 1), -2.0, dtype=torch.float64)
    x = (q + torch.tensor([2.0, 8.0, 0.5, 100.0]).log().view(1, 4, 1)).requires_grad_()
    inputs = {
        "logprobs": q,
        "advantages": torch.tensor([1.0, -1.0, 2.0, 0.0]).view(1, 4, 1),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]).view(1, 4, 1),
    }
    terms = loss_terms("gspo", x, inputs, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    assert terms.flatten().tolist() == pytest.approx([-1.5, 2.0, -3.0, 0.0])  # s = (2 * 8 / 2) ** (1 / 3) = 2
    terms.sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0])
    x.grad = None
    wide = loss_terms("gspo", x, inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0})
    wide.sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([-2.0, 2.0, -4.0, 0.0])


def test_cross_entropy_takes_any_weights_and_several_targets():
    x = torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]], requires_grad=True)
    weights = torch.tensor([[[0.5, -2.0], [0.0, 7.0]]])
    terms = loss_terms("cross_entropy", x, {"weights": weights}, {})
    assert terms.dtype == torch.float64 and terms.sum().item() == 0.5 - 4.0 + 28.0
    terms.sum().backward()
    assert torch.equal(x.grad, -weights)


def test_logprobs_of_tokens_without_an_advantage_do_not_count():
    """A client may fill them with any number: the ratio would overflow to infinity."""
    x = torch.tensor([[[-1.0], [-2.0]]], requires_grad=True)
    inputs = {"logprobs": torch.tensor([[[-1e30], [-2.0]]]), "advantages": torch.tensor([[[0.0], [1.0]]])}
    for name in ("importance_sampling", "ppo", "cispo"):
        terms = loss_terms(name, x, inputs, check_loss(name, {}))
        terms.sum().backward()
        assert torch.isfinite(terms).all() and terms[0, 0, 0] == 0
        assert torch.isfinite(x.grad).all() and x.grad[0, 0, 0] == 0


def test_defaults_are_those_of_the_interface():
    assert check_loss("ppo", {}) == CLIP
    assert check_loss("cispo", {"clip_high_threshold": 2}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    assert check_loss("dro", {}) == {"beta": 0.05}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ppo_clip", {}, "There is no loss 'ppo_clip'. Losses: cross_entropy"),
        ("stable_reinforce", {}, "not available here: its formula is not published"),
        ("gspo", {}, "needs the settings clip_low_threshold, clip_high_threshold"),
        ("ppo", {"beta": 1.0}, "no setting 'beta'. It has clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "It has none"),
        ("dro", {"beta": math.nan}, "has to be a finite number"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold=2 above clip_high_threshold=1.2"),
    ],
)
def test_unusable_losses_are_refused(name, settings, message):
    with pytest.raises(DataError, match=message):
        check_loss(name, settings)


def usable(name: str) -> dict[str, np.ndarray]:
    return {"target_tokens": np.array([1, 2, 3])} | {key: np.ones(3, np.float32) for key in LOSSES[name].inputs}


@pytest.mark.parametrize("name", LOSSES)
def test_usable_inputs_are_accepted(name):
    assert check_loss_inputs(name, 3, usable(name), 10) == (3,)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ppo", {"logprobs": None}, "needs the inputs logprobs, and got"),
        ("cross_entropy", {"target_tokens": np.array([1, 2])}, r"shape \(2,\) for 3 tokens"),
        ("cross_entropy", {"target_tokens": np.array([1, 2, 10])}, "holds 10, and token ids are 0 to 9"),
        ("cross_entropy", {"target_tokens": np.array([1, -1, 2])}, "holds -1"),
        ("cross_entropy", {"target_tokens": np.array([1.0, 1.0, 2.0])}, "has to hold integers"),
        ("cross_entropy", {"weights": np.array([1.0, math.nan, 1.0])}, "weights holds NaN"),
        ("cross_entropy", {"weights": np.ones((3, 2))}, r"weights has the shape \(3, 2\)"),
        ("ppo", {"target_tokens": np.ones((3, 2), np.int64)}, "takes one target at each position"),
        ("ppo", {"advantages": np.array([1.0, math.inf, 1.0])}, "advantages holds NaN or infinity"),
        ("gspo", {"sequence_ratio_mask": np.array([1.0, -1.0, 1.0])}, "negative"),
    ],
)
def test_unusable_inputs_are_refused(name, changes, message):
    inputs = {key: value for key, value in (usable(name) | changes).items() if value is not None}
    with pytest.raises(DataError, match=message):
        check_loss_inputs(name, 3, inputs, 10)
