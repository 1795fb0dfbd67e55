"""Advantages of teachers: their formula, the gradient that they give, and their sum with advantages of rewards."""

import pytest
import torch

from nemo_rl.algorithms.advantage_estimator import OPDAdvantageEstimator
from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

MASK = torch.tensor([[0.0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]])
POLICY = torch.tensor([[9.0, -1.0, -2.0], [9, -0.5, 9], [9, -3.0, -0.25], [9, 9, 9]])
TEACHER = torch.tensor([[0.0, -0.5, -4.0], [0, -0.5, 0], [0, -1.0, -0.25], [0, 0, 0]])
GAP = torch.tensor([[0.0, 0.5, -2.0], [0, 0, 0], [0, 2.0, 0], [0, 0, 0]])
"""Teacher minus policy at the tokens that count."""


def advantages(rewards=(1.0, 0.0, 1.0, 0.0), valid=(1.0, 1, 1, 1), clip=(None, None), **options):
    grpo = GRPOConfig.build(
        adv_estimator={"name": "opd", "normalize_rewards": False, "use_leave_one_out_baseline": False} | options,
        advantage_clip_low=clip[0],
        advantage_clip_high=clip[1],
    )
    return make_advantage_estimator(grpo, ClippedPGLossConfig.build()).compute_advantage(
        None,
        torch.tensor(rewards),
        MASK,
        group_ids=torch.tensor([0, 0, 1, 1]),
        valid_mask=torch.tensor(valid),
        logprobs_policy=POLICY,
        logprobs_teacher=TEACHER,
    )


def test_the_advantage_is_teacher_minus_policy_at_each_token() -> None:
    assert torch.equal(advantages(), GAP)
    assert torch.equal(advantages(teacher_weight=0.5), GAP / 2)
    assert torch.equal(advantages(clip=(-1.0, 1.0)), GAP.clamp(-1, 1))


def test_advantages_of_rewards_are_added() -> None:
    centred = torch.tensor([0.5, -0.5, 0.5, -0.5])[:, None] * MASK
    assert torch.allclose(advantages(reward_advantages="dr_grpo"), GAP + centred)
    assert torch.allclose(advantages(reward_advantages="grpo"), GAP + centred)
    rloo = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * MASK
    assert torch.allclose(advantages(reward_advantages="rloo"), GAP + rloo)


def test_a_sample_without_a_reward_learns_from_its_teacher_only() -> None:
    found = advantages(rewards=(1.0, 0.0, 0.0, 1.0), valid=(1.0, 1, 0, 1), reward_advantages="dr_grpo")
    assert torch.equal(found[2], GAP[2])


def test_the_expected_policy_gradient_is_that_of_the_reverse_kl() -> None:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=gen, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(7, generator=gen, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    estimator = OPDAdvantageEstimator(GRPOConfig.build(adv_estimator={"name": "opd"}).adv_estimator, None)
    found = estimator.compute_advantage(
        None,
        torch.zeros(7, dtype=torch.float64),
        torch.ones(7, 1),
        logprobs_policy=log_p.detach()[:, None],
        logprobs_teacher=log_q[:, None],
    )[:, 0]
    (of_advantages,) = torch.autograd.grad((log_p.detach().exp() * found * log_p).sum(), logits, retain_graph=True)
    (of_divergence,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    torch.testing.assert_close(of_advantages, -of_divergence, rtol=1e-12, atol=1e-14)


def test_missing_scores_are_named() -> None:
    estimator = OPDAdvantageEstimator(GRPOConfig.build(adv_estimator={"name": "opd"}).adv_estimator, None)
    with pytest.raises(DataError, match="needs logprobs_teacher"):
        estimator.compute_advantage(None, torch.zeros(1), torch.ones(1, 2))
