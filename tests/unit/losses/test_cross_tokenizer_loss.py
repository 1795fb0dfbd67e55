"""The loss over outcomes of two tokenizers against its definition in float64, token by token."""

import math
from typing import Any

import pytest
import torch
from loss_batches import denominators, random_batch
from torch import Tensor
from torch.autograd import gradcheck

from nemo_rl.config import DistillationLossConfig
from nemo_rl.losses.cross_tokenizer import (
    COLUMNS,
    IN_NO_CLASS,
    NO_SPAN,
    NOWHERE,
    WITHOUT_SLOT,
    CrossTokenizerLossFn,
    candidates_of,
    of_teacher,
)
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossInputType, LossType
from nemo_rl.losses.supervised import TEACHER_WEIGHTS, DistillationLossFn

pytestmark = pytest.mark.fast

B, T, V = 5, 7, 9
SLOTS = [0, 0, 1, 2, 2, 3, IN_NO_CLASS, IN_NO_CLASS, NOWHERE]
"""Slot of each token of the student. At some positions slot 3 does not exist."""
SPANS = [(0, 1), (1, 3), (4, 1), (5, 1)]
"""First position and number of tokens of each span of a row."""
KINDS = ("forward", "reverse", "mixed", "jensen_shannon")


def loss_of(kind: str, **keys: Any) -> CrossTokenizerLossFn:
    return CrossTokenizerLossFn(DistillationLossConfig.build(kl_type=kind, mixed_kl_weight=0.3, **keys))


def batch(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Student logits `[B, T - 1, V]`, and a batch whose candidates are the next token and all tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T - 1, V, generator=generator, dtype=torch.float64)
    _, masks = random_batch(B, T, seed=seed, masked_rows=[2])
    # # As in a run, either all tokens of a span count or none.
    for start, length in SPANS:
        masks["token_mask"][:, start + 1 : start + 1 + length] = masks["token_mask"][:, start + 1, None]
    following = torch.randint(0, 6, (B, T, 1), generator=generator)
    everything = torch.arange(V).expand(B, T, V)
    slots = torch.tensor(SLOTS).repeat(B, T, 1)
    teacher = torch.softmax(2 * torch.randn(B, T, 7, generator=generator, dtype=torch.float64), -1).log()
    short = torch.rand(B, T, generator=generator) < 0.4
    teacher[short, 3] = -math.inf
    slots[short[..., None] & (slots == 3)] = NOWHERE
    starts, span_slots = torch.full((B, T), -1), torch.full((B, T), NO_SPAN)
    span_logprobs = torch.zeros(B, T, dtype=torch.float64)
    for start, length in SPANS:
        starts[:, start : start + length] = start
        if length > 1:
            of_first = slots.gather(-1, following)[:, start, 0]
            span_slots[:, start] = of_first.where(of_first >= 0, WITHOUT_SLOT)
            span_logprobs[:, start] = teacher[:, start, 6]
    columns = {
        "candidate_ids": torch.cat([following, everything], -1),
        "candidate_slots": torch.cat([torch.full((B, T, 1), NOWHERE), slots], -1),
        "candidate_log_weights": torch.zeros(B, T, V + 1, dtype=torch.float64),
        "teacher_slots": teacher[..., :4],
        "teacher_sorted": teacher[..., 4:6].exp().sort(-1, descending=True).values,
        "span_starts": starts,
        "span_slots": span_slots,
        "span_logprobs": span_logprobs,
    }
    return logits, masks | columns


class FromLogits:
    """The loss as a function of the student's logits, as a worker would call it."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.CANDIDATES
    needs_reference = False

    def __init__(self, loss_fn: CrossTokenizerLossFn):
        self.loss_fn = loss_fn

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        scores = torch.log_softmax(logits, -1).gather(-1, data["candidate_ids"][:, :-1])
        return self.loss_fn(scores, data=data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks)


def divergence(kind: str, p: list[Tensor], q: list[Tensor]) -> Tensor:
    weight = {"forward": 1.0, "reverse": 0.0}.get(kind, 0.3)
    pairs = list(zip(p, q, strict=True))
    if kind == "jensen_shannon":
        return sum(
            0.3 * b * (b / (0.3 * b + 0.7 * a)).log() + 0.7 * a * (a / (0.3 * b + 0.7 * a)).log() for a, b in pairs
        )
    return sum(weight * b * (b / a).log() + (1 - weight) * a * (a / b).log() for a, b in pairs)


def at_start(kind: str, probs_TV: Tensor, data: dict[str, Tensor], b: int, start: int, length: int) -> Tensor:
    """Return the divergence and the distance at the beginning of a span, outcome by outcome."""
    p: dict[Any, Tensor] = {}
    alone = []
    for token in range(V):
        slot = int(data["candidate_slots"][b, start, token + 1])
        if slot >= 0:
            p[slot] = p.get(slot, 0) + probs_TV[start, token]
        elif slot == IN_NO_CLASS:
            alone.append(probs_TV[start, token])
    q = {slot: data["teacher_slots"][b, start, slot].exp() for slot in p}
    if length > 1:
        following = data["candidate_ids"][b, start : start + length, 0]
        p["text"] = math.prod(probs_TV[start + n, following[n]] for n in range(length))
        q["text"] = data["span_logprobs"][b, start].exp()
        if (slot := int(data["span_slots"][b, start])) >= 0:
            p[slot] = p[slot] - p["text"]
    p["rest"], q["rest"] = (1 - sum(each.values()) for each in (p, q))
    alone = sorted(alone, reverse=True)
    distance = sum((mine - theirs).abs() for mine, theirs in zip(alone, data["teacher_sorted"][b, start], strict=True))
    return torch.stack([divergence(kind, list(p.values()), [q[name] for name in p]), distance])


def by_hand(kind: str, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Return the mean divergence and distance over all tokens that count."""
    counted = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    probs = torch.softmax(logits, -1)
    found = [
        counted[b, start] * at_start(kind, probs[b], data, b, start, length)
        for b in range(B)
        for start, length in SPANS
        if counted[b, start]
    ]
    return torch.stack(found).sum(0) / counted.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_equal_the_definition(kind) -> None:
    logits, data = batch()
    leaf, reference = (logits.clone().requires_grad_() for _ in range(2))
    loss, metrics = FromLogits(loss_of(kind, kl_loss_weight=0.7, uncommon_loss_weight=1.9))(
        leaf, data, **denominators(data)
    )
    want = by_hand(kind, reference, data)
    (0.7 * want[0] + 1.9 * want[1]).backward()
    loss.backward()
    assert loss.item() == pytest.approx((0.7 * want[0] + 1.9 * want[1]).item(), rel=1e-10)
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-8, atol=1e-12)
    assert metrics["unmatched_distance"].item() == pytest.approx(want[1].item(), rel=1e-10)
    for name in ("forward", "reverse"):
        assert metrics[f"{name}_kl"].item() == pytest.approx(by_hand(name, logits, data)[0].item(), rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind) -> None:
    logits, data = batch(seed=1)
    function = FromLogits(loss_of(kind))
    assert gradcheck(lambda x: function(x, data, **denominators(data))[0], logits.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_does_not_depend_on_the_batch_split(kind) -> None:
    logits, data = batch()
    check_invariance(FromLogits(loss_of(kind)), logits, data | {TEACHER_WEIGHTS: torch.arange(B) + 0.5})


def equal_tokens(logits: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """A batch in which each token is a slot and a span, and the candidates are all tokens."""
    _, masks = random_batch(B, T, masked_rows=[2])
    everything = torch.arange(V).expand(B, T, V)
    nothing = torch.full((B, T, 1), NOWHERE)
    return masks | {
        "candidate_ids": torch.cat([torch.zeros_like(nothing), everything], -1),
        "candidate_slots": torch.cat([nothing, everything], -1),
        "candidate_log_weights": torch.zeros(B, T, V + 1),
        "teacher_slots": torch.log_softmax(teacher, -1),
        "teacher_sorted": torch.zeros(B, T, 0),
        "span_starts": torch.arange(T).expand(B, T),
        "span_slots": torch.full((B, T), NO_SPAN),
        "span_logprobs": torch.zeros(B, T),
        "teacher_topk_logits": teacher,
        "teacher_topk_indices": everything,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tokens_give_the_divergence_of_distillation(kind) -> None:
    logits, _ = batch()
    teacher = torch.randn(B, T, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = equal_tokens(logits, teacher)
    data[TEACHER_WEIGHTS] = torch.tensor([1.0, 2, 1, 0.5, 1])
    scores = torch.log_softmax(logits, -1)
    want, _ = DistillationLossFn(loss_of(kind).cfg)(scores, teacher[:, :-1], None, data=data, **denominators(data))
    got, metrics = FromLogits(loss_of(kind))(logits, data, **denominators(data))
    assert got.item() == pytest.approx(want.item(), rel=1e-10)
    assert metrics["spans_per_token"].item() == metrics["matched_mass"].item() == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_equals_the_teacher_has_no_loss_and_no_gradient(kind) -> None:
    logits, _ = batch()
    data = equal_tokens(logits, torch.nn.functional.pad(logits, (0, 0, 0, 1)))
    leaf = logits.clone().requires_grad_()
    loss, _ = FromLogits(loss_of(kind))(leaf, data, **denominators(data))
    loss.backward()
    assert abs(loss.item()) < (1e-15 if kind == "jensen_shannon" else 5e-324)  # the mean of both is rounded
    assert leaf.grad.abs().max() < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_several_teachers_are_added(kind) -> None:
    logits, data = batch()
    _, other = batch(seed=5)
    both = data | {of_teacher(name, 1): other[name] for name in COLUMNS}
    both |= {of_teacher(TEACHER_WEIGHTS, 1): torch.full((B,), 0.25)}
    leaf, reference = (logits.clone().requires_grad_() for _ in range(2))
    scores = torch.log_softmax(leaf, -1).gather(-1, candidates_of(both)[:, :-1])
    loss_fn = CrossTokenizerLossFn(loss_of(kind).cfg, num_teachers=2)
    got, metrics = loss_fn(scores, data=both, **denominators(data))
    one, of_one = FromLogits(loss_of(kind))(reference, data, **denominators(data))
    masks = {name: data[name] for name in ("token_mask", "sample_mask")}
    two, of_two = FromLogits(loss_of(kind))(reference, other | masks, **denominators(data))
    got.backward()
    (one + 0.25 * two).backward()
    assert got.item() == pytest.approx((one + 0.25 * two).item(), rel=1e-12)
    torch.testing.assert_close(leaf.grad, reference.grad)
    assert metrics["forward_kl"].item() == pytest.approx((of_one["forward_kl"] + of_two["forward_kl"]).item() / 2)


def test_a_share_of_a_token_counts_in_each_of_its_slots() -> None:
    """Half of token 0 is in slot 0 and half in slot 1, so slot 1 has p(0) / 2 + p(2)."""
    logits, data = batch()
    probs = torch.softmax(logits, -1)
    shares = torch.tensor([0.0, 0.5, 0.5])[[1, 2, 0]].log()
    columns = {
        "candidate_ids": torch.tensor([0, 0, 0, 2]).expand(B, T, 4),
        "candidate_slots": torch.tensor([NOWHERE, 0, 1, 1]).expand(B, T, 4),
        "candidate_log_weights": torch.tensor([0.0, shares[0], shares[0], 0.0]).expand(B, T, 4),
        "teacher_slots": torch.tensor([0.2, 0.3]).log().expand(B, T, 2),
        "teacher_sorted": torch.zeros(B, T, 0),
        "span_starts": torch.arange(T).expand(B, T),
        "span_slots": torch.full((B, T), NO_SPAN),
        "span_logprobs": torch.zeros(B, T),
    }
    data |= columns
    got, _ = FromLogits(loss_of("reverse"))(logits, data, **denominators(data))
    first, second = probs[..., 0] / 2, probs[..., 0] / 2 + probs[..., 2]
    rest = 1 - first - second
    each = first * (first / 0.2).log() + second * (second / 0.3).log() + rest * (rest / 0.5).log()
    counted = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    assert got.item() == pytest.approx(((each * counted).sum() / counted.sum()).item(), rel=1e-6)


def test_rows_that_only_fill_a_microbatch_have_finite_gradients() -> None:
    """Their candidates have no scores, and their slots no candidates."""
    logits, data = batch()
    data["candidate_slots"] = torch.zeros_like(data["candidate_slots"]).masked_fill(torch.ones(B, T, 1).bool(), NOWHERE)
    scores = torch.zeros(B, T - 1, V + 1, requires_grad=True)
    data["sample_mask"] = torch.zeros(B)
    loss, _ = loss_of("mixed")(scores, data=data, global_valid_seqs=3.0, global_valid_toks=5.0)
    loss.backward()
    assert loss.item() == 0 and not scores.grad.any()
