"""The distillation loss against full-vocabulary references in float64, and the path from hidden states to it."""

import math

import pytest
import torch
from loss_batches import denominators, random_batch
from torch.autograd import gradcheck

from nemo_rl.config import DistillationLossConfig
from nemo_rl.distributed.parallel_logprobs import (
    SamplingDensity,
    TopK,
    logprobs_from_logits,
    token_logprobs,
    topk_logits,
)
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossInputType, LossType
from nemo_rl.losses.supervised import LOG_TEACHER_OUTSIDE, DistillationLossFn
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

B, T, V, D = 6, 5, 11, 7
ALL_KINDS = [(kind, zero) for kind in ("forward", "reverse", "mixed", "jensen_shannon") for zero in (False, True)]


def loss_of(kind: str, zero: bool, weight: float = 0.3) -> DistillationLossFn:
    return DistillationLossFn(
        DistillationLossConfig.build(kl_type=kind, mixed_kl_weight=weight, zero_outside_topk=zero)
    )


def teacher_batch(k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Student logits `[B, T - 1, V]`, full teacher logits `[B, T, V]`, and the batch with its top-k."""
    gen = torch.Generator().manual_seed(seed)
    student = 2 * torch.randn(B, T - 1, V, generator=gen, dtype=torch.float64)
    teacher = 2 * torch.randn(B, T, V, generator=gen, dtype=torch.float64)
    logits, indices = teacher.topk(k, dim=-1)
    _, masks = random_batch(B, T, seed=seed, masked_rows=[2])
    return student, teacher, masks | {"teacher_topk_logits": logits, "teacher_topk_indices": indices}


class FromLogits:
    """The loss as a function of the student's logits, as a worker would call it."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    needs_reference = False

    def __init__(self, loss_fn: DistillationLossFn):
        self.loss_fn = loss_fn

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        wanted = data["teacher_topk_indices"][:, :-1]
        flat = logits.flatten(0, 1)
        logprobs, entropy = logprobs_from_logits(flat, wanted.flatten(0, 1))
        teacher = torch.log_softmax(data["teacher_topk_logits"][:, :-1].to(logits.dtype), dim=-1)
        return self.loss_fn(
            logprobs.view(*logits.shape[:2], -1),
            teacher,
            -entropy.view(logits.shape[:2]),
            data=data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )


def jensen_shannon(
    weight: float, log_q: torch.Tensor, kept: torch.Tensor, log_p: torch.Tensor, *, whole: bool
) -> torch.Tensor:
    """Compute `w KL(q || m) + (1 - w) KL(p || m)` with `m = w q + (1 - w) p` from its definition."""
    p = log_p.exp()
    q = torch.zeros(V, dtype=torch.float64).scatter(0, kept, log_q.exp()) if whole else log_q.exp()
    m = weight * q + (1 - weight) * p
    of_teacher = sum(q[v] * (q[v] / m[v]).log() for v in range(len(q)) if q[v] > 0)
    return weight * of_teacher + (1 - weight) * (p * (p / m).log()).sum()


def by_hand(kind: str, zero: bool, weight: float, student: torch.Tensor, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the divergence from its definition with full-vocabulary distributions, token by token."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    total = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in range(T - 1):
            if mask[b, t] == 0:
                continue
            kept = data["teacher_topk_indices"][b, t]
            log_q = torch.log_softmax(data["teacher_topk_logits"][b, t], dim=-1)
            log_p = torch.log_softmax(student[b, t], dim=-1)
            if zero:
                full_q = torch.full((V,), LOG_TEACHER_OUTSIDE, dtype=torch.float64).scatter(0, kept, log_q)
                forward = sum(log_q[i].exp() * (log_q[i] - log_p[kept[i]]) for i in range(len(kept)))
                reverse = sum(log_p[v].exp() * (log_p[v] - full_q[v]) for v in range(V))
            else:
                log_p_kept = torch.log_softmax(student[b, t][kept], dim=-1)
                forward = (log_q.exp() * (log_q - log_p_kept)).sum()
                reverse = (log_p_kept.exp() * (log_p_kept - log_q)).sum()
            if kind == "jensen_shannon":
                total = total + jensen_shannon(weight, log_q, kept, log_p if zero else log_p_kept, whole=zero)
                continue
            share = {"forward": 1.0, "reverse": 0.0, "mixed": weight}[kind]
            total = total + share * forward + (1 - share) * reverse
    return total / mask.sum()


@pytest.mark.parametrize(("kind", "zero"), ALL_KINDS)
@pytest.mark.parametrize("k", [1, 4, V])
def test_value_and_gradient_equal_the_definition(kind, zero, k) -> None:
    student, _, data = teacher_batch(k)
    leaf, reference = (student.clone().requires_grad_(True) for _ in range(2))
    loss, metrics = FromLogits(loss_of(kind, zero))(leaf, data, **denominators(data))
    want = by_hand(kind, zero, 0.3, reference, data)
    loss.backward()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-6, atol=1e-12)
    assert metrics["forward_kl"].item() == pytest.approx(by_hand("forward", zero, 0.3, student, data).item(), abs=1e-10)
    assert metrics["reverse_kl"].item() == pytest.approx(by_hand("reverse", zero, 0.3, student, data).item(), abs=1e-10)


@pytest.mark.parametrize(("kind", "zero"), ALL_KINDS)
def test_top_k_of_the_whole_vocabulary_gives_the_exact_divergence(kind, zero) -> None:
    student, teacher, data = teacher_batch(V)
    log_p, log_q = torch.log_softmax(student, -1), torch.log_softmax(teacher[:, :-1], -1)
    forward = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    reverse = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    weight = {"forward": 1.0, "reverse": 0.0}.get(kind, 0.3)
    if kind == "jensen_shannon":
        log_m = (weight * log_q.exp() + (1 - weight) * log_p.exp()).log()
        forward = torch.nn.functional.kl_div(log_m, log_q, log_target=True, reduction="none").sum(-1)
        reverse = torch.nn.functional.kl_div(log_m, log_p, log_target=True, reduction="none").sum(-1)
    want = ((weight * forward + (1 - weight) * reverse) * mask).sum() / mask.sum()
    got, metrics = FromLogits(loss_of(kind, zero))(student, data, **denominators(data))
    assert got.item() == pytest.approx(want.item(), rel=1e-10)
    assert metrics["student_topk_mass"].item() == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize(("kind", "zero"), ALL_KINDS)
def test_a_student_that_equals_the_teacher_has_zero_loss_and_gradient(kind, zero) -> None:
    _, teacher, data = teacher_batch(V)
    leaf = (teacher[:, :-1] + 3).clone().requires_grad_(True)
    loss, _ = FromLogits(loss_of(kind, zero))(leaf, data, **denominators(data))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert leaf.grad.abs().max() < 1e-12


@pytest.mark.parametrize(("kind", "zero"), ALL_KINDS)
def test_gradients_equal_finite_differences(kind, zero) -> None:
    student, _, data = teacher_batch(3, seed=1)
    fn = FromLogits(loss_of(kind, zero))
    assert gradcheck(lambda x: fn(x, data, **denominators(data))[0], student.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(("kind", "zero"), ALL_KINDS)
def test_the_loss_does_not_depend_on_the_batch_split(kind, zero) -> None:
    student, _, data = teacher_batch(4)
    check_invariance(FromLogits(loss_of(kind, zero)), student, data)


def test_the_tail_counts_only_where_the_formula_has_it() -> None:
    """Mass that the student moves outside of the top-k costs nothing within it, and 100 nats a unit with zeros."""
    student, _, data = teacher_batch(3)
    pushed = student.clone()
    outside = torch.ones(B, T - 1, V).scatter(-1, data["teacher_topk_indices"][:, :-1], 0).bool()
    pushed[outside] += 2.0
    values = denominators(data)
    for kind in ("forward", "reverse"):
        within = [FromLogits(loss_of(kind, False))(x, data, **values)[0].item() for x in (student, pushed)]
        assert within[0] == pytest.approx(within[1], rel=1e-12)
        zeroed = [FromLogits(loss_of(kind, True))(x, data, **values) for x in (student, pushed)]
        assert zeroed[1][0] > zeroed[0][0]
    lost = zeroed[0][1]["student_topk_mass"] - zeroed[1][1]["student_topk_mass"]
    assert zeroed[1][0] - zeroed[0][0] == pytest.approx(-LOG_TEACHER_OUTSIDE * lost.item(), rel=0.05)


def test_teacher_inputs_may_already_be_normalised_over_the_top_k() -> None:
    student, _, data = teacher_batch(4)
    indices = data["teacher_topk_indices"][:, :-1]
    picked = student.gather(-1, indices)
    teacher = data["teacher_topk_logits"][:, :-1]
    loss_fn = loss_of("mixed", False)
    values = denominators(data)
    want = FromLogits(loss_fn)(student, data, **values)[0]
    got, metrics = loss_fn(torch.log_softmax(picked, -1), torch.log_softmax(teacher, -1), None, data=data, **values)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    assert "student_entropy" not in metrics
    given = loss_of("mixed", True)(picked, teacher, torch.full(picked.shape[:2], -1.5), data=data, **values)[1]
    assert given["student_entropy"].item() == pytest.approx(1.5)
    with pytest.raises(ValueError, match="needs H_all"):
        loss_of("mixed", True)(picked, teacher, None, data=data, **values)
    assert math.isfinite(loss_of("forward", True)(picked, teacher, None, data=data, **values)[0].item())


def test_unknown_directions_and_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="kl_type"):
        DistillationLossConfig.build(kl_type="sideways")
    with pytest.raises(ConfigError, match="mixed_kl_weight"):
        DistillationLossConfig.build(mixed_kl_weight=1.5)


@pytest.mark.parametrize("chunk_size", [1, 8, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_several_targets_of_a_token_are_scored_in_chunks(chunk_size, temperature) -> None:
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, D, generator=gen, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=gen, dtype=torch.float64).requires_grad_()
    bias = torch.randn(V, generator=gen, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, V, (23, 4), generator=gen)  # the same token may be requested twice
    leaves = (hidden, weight, bias)
    coeff, coeff_h = torch.randn(23, 4, generator=gen).double(), torch.randn(23, generator=gen).double()

    logp = torch.log_softmax((hidden @ weight.t() + bias) / temperature, dim=-1)
    want, want_h = logp.gather(-1, targets), -(logp.exp() * logp).sum(-1)
    want_grads = torch.autograd.grad((coeff * want).sum() + (coeff_h * want_h).sum(), leaves)
    got, got_h = token_logprobs(
        hidden, weight, targets, density=SamplingDensity(temperature), bias_V=bias, chunk_size=chunk_size
    )
    got_grads = torch.autograd.grad((coeff * got).sum() + (coeff_h * got_h).sum(), leaves)

    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_h, want_h, rtol=0, atol=1e-12)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11)


def test_top_k_in_chunks_equals_top_k_of_the_whole() -> None:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(23, D, generator=gen), torch.randn(V, D, generator=gen)
    logits = hidden @ weight.t()
    values, ids = topk_logits(hidden, weight, TopK(4), chunk_size=5)
    torch.testing.assert_close(values, logits.topk(4).values)
    assert torch.equal(ids, logits.topk(4).indices) and ids.dtype == torch.int64
    values, ids = topk_logits(hidden, weight, TopK(4, vocab_size=6), chunk_size=5)
    torch.testing.assert_close(values, logits[:, :6].topk(4).values)
    assert ids.max() < 6


def test_num_valid_samples_counts_answers_and_no_filler_rows() -> None:
    """Of six rows one is masked, and one filler row has no unmasked token."""
    student, _, data = teacher_batch(3)
    data["sample_mask"] = torch.tensor([1.0, 1, 0, 1, 1, 0])
    data["token_mask"] = torch.ones(B, T)
    data["token_mask"][5] = 0
    metrics = FromLogits(loss_of("forward", False))(student, data, **denominators(data))[1]
    assert float(metrics["num_valid_samples"]) == 5
    assert float(metrics["num_unmasked_tokens"]) == 4 * (T - 1)
