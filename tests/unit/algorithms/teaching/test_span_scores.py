"""Real tiny models with two tokenizers: what the stage writes gives the loss that follows from the texts of tokens."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_models import TinyShape, make_char_tokenizer, make_pair_tokenizer, make_tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.projection import Projection, common_beginnings, identity, shared_tokens
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts
from nemo_rl.algorithms.teaching.span_scores import SameTokens, SpanTeacher, TokenComparison
from nemo_rl.algorithms.teaching.teachers import TeacherRoutes
from nemo_rl.algorithms.teaching.text_alignment import AlignedTeacher, TextReader, WrittenReader, spelling
from nemo_rl.algorithms.teaching.token_weights import TeacherWeight
from nemo_rl.config import DistillationLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK, topk_of
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.cross_tokenizer import COLUMNS, NOWHERE, CrossTokenizerLossFn
from nemo_rl.losses.supervised import TEACHER_WEIGHTS, DistillationLossFn

CHARS, PAIRS = make_char_tokenizer(), make_pair_tokenizer()
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
TEMPERATURE = 0.7
ANSWERS = ("5=13, 102", "1+98=99", "é1")


class Scorer:
    """A model of transformers in float64, as a stage calls models of a run."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        shape = TinyShape(vocab_size=len(tokenizer), initializer_range=0.3, **SMALL)
        self.hf: PreTrainedModel = make_tiny_model(shape=shape, seed=seed).double()

    def logits(self, data: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.hf(input_ids=data["input_ids"], use_cache=False).logits

    def get_topk_logits(self, data, k, *, vocab_size=None, temperature=None) -> dict[str, Tensor]:
        logits = self.logits(data)
        values, ids = topk_of(logits.flatten(0, 1), TopK(k, vocab_size, temperature))
        return {"topk_logits": values.view(*logits.shape[:2], k), "topk_indices": ids.view(*logits.shape[:2], k)}

    def get_logprobs(self, data) -> dict[str, Tensor]:
        logprobs = torch.log_softmax(self.logits(data)[:, :-1] / TEMPERATURE, -1)
        scores = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
        return {"logprobs": torch.nn.functional.pad(scores, (1, 0))}


def batch_of(tokenizer: PreTrainedTokenizerFast) -> tuple[StepBatch, list[dict[str, Any]]]:
    """Answers in the tokens of a policy, and the rows of the data."""
    rows, data = [], []
    for index, text in enumerate(ANSWERS):
        chat = [{"role": "user", "content": f"{index}+12="}]
        prompt = torch.tensor(
            tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        )
        answer = torch.tensor([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
        log = [
            {"role": "user", "content": "", "token_ids": prompt},
            {
                "role": "assistant",
                "content": text,
                "token_ids": answer,
                "generation_logprobs": torch.zeros(len(answer)),
            },
        ]
        rows.append(Trajectory(index, 0, index, "math", log, len(prompt), reward=1.0))
        data.append({"message_log": log[:1], "idx": index, "chat": {"messages": chat, "tools": None}})
    ids = [torch.cat([message["token_ids"] for message in row.message_log]) for row in rows]
    width = max(map(len, ids))
    places = torch.arange(width)
    mask = torch.stack(
        [(places >= row.prompt_length) & (places < len(each)) for row, each in zip(rows, ids, strict=True)]
    )
    tensors = BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        input_lengths=torch.tensor([len(each) for each in ids]),
        token_mask=mask.double(),
        sample_mask=torch.ones(len(ids), dtype=torch.float64),
    )
    return StepBatch(tensors, rows), data


def stage_of(
    models: tuple[Scorer, Scorer], data: list[dict[str, Any]], projection: Projection, **keys: Any
) -> SpanTeacher:
    how = {"top": 400, "unmatched": 400, "single_tokens_only": False, "temperature": TEMPERATURE} | keys
    reader = TextReader(TeacherPrompts(data, PAIRS), CHARS, 100)  # type: ignore[arg-type]
    return SpanTeacher(*models, "teacher", None, reader, TokenComparison(projection, **how))  # type: ignore[arg-type]


def loss_of(batch: StepBatch, student: Scorer, **keys: Any) -> tuple[float, dict[str, Any], dict[str, Tensor]]:
    """Return loss, metrics and the gradients of the student's weights."""
    tensors = batch.tensors
    logits = student.hf(input_ids=tensors["input_ids"], use_cache=False).logits / TEMPERATURE
    scores = torch.log_softmax(logits[:, :-1], -1).gather(-1, tensors["candidate_ids"][:, :-1])
    count = tensors["token_mask"][:, 1:].sum()
    loss, metrics = CrossTokenizerLossFn(DistillationLossConfig.build(kl_type="forward", **keys))(
        scores, data=tensors, global_valid_seqs=3.0, global_valid_toks=count
    )
    student.hf.zero_grad()
    loss.backward()
    return loss.item(), metrics, {name: each.grad.clone() for name, each in student.hf.named_parameters()}


MODELS = (Scorer(CHARS, 1), Scorer(PAIRS, 2))


def text_of(tokenizer: PreTrainedTokenizerFast, token: int) -> bytes:
    return b"" if token == tokenizer.eos_token_id else spelling(tokenizer)(token)


def class_by_text(kind: str, tokenizer: PreTrainedTokenizerFast, token: int) -> bytes | None:
    """Return the name of a token's class, from the rules of the two tokenizers of this test."""
    text = text_of(tokenizer, token)
    if token == tokenizer.pad_token_id:
        return b"<pad>"
    if token != tokenizer.eos_token_id and token in tokenizer.added_tokens_decoder:
        return None
    if kind == "xtoken":
        return text[:1]
    return None if len(text) > 1 else text


def by_hand(kind: str, batch: StepBatch, data: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the summed forward divergence and distance of all spans, from full distributions in float64."""
    student, teacher = MODELS
    total = distance = 0.0
    for row, datum in zip(batch.rows, data, strict=True):
        own = torch.cat([message["token_ids"] for message in row.message_log])
        prompt = PAIRS.apply_chat_template(datum["chat"]["messages"], tokenize=False, add_generation_prompt=True)
        before = PAIRS.encode(prompt)
        other = torch.tensor([*before, *PAIRS.encode(ANSWERS[row.idx], add_special_tokens=False), PAIRS.eos_token_id])
        log_p, log_q = (
            torch.log_softmax(model.logits({"input_ids": each[None]})[0] / TEMPERATURE, -1)
            for model, each in ((student, own), (teacher, other))
        )
        for mine, theirs in spans(own[row.prompt_length :], other[len(before) :]):
            a, c = row.prompt_length + mine.start, len(before) + theirs.start
            p, q = {}, {}
            alone = ([], [])
            whole = mine.stop - mine.start > 1 or theirs.stop - theirs.start > 1
            sides = ((CHARS, log_p[a - 1], own[a], p, alone[0]), (PAIRS, log_q[c - 1], other[c], q, alone[1]))
            for tokenizer, logs, first, found, rest in sides:
                for token, each in enumerate(logs.exp().tolist()):
                    name = class_by_text(kind, tokenizer, token)
                    if name is not None:
                        found[name] = found.get(name, 0.0) + each
                    elif kind == "gold" and not (whole and token == first):
                        rest.append(each)
            if whole:
                size, width = mine.stop - mine.start, theirs.stop - theirs.start
                p["text"] = math.exp(sum(log_p[a - 1 + n, own[a + n]] for n in range(size)))
                q["text"] = math.exp(sum(log_q[c - 1 + n, other[c + n]] for n in range(width)))
                for tokenizer, first, found in ((CHARS, own[a], p), (PAIRS, other[c], q)):
                    name = class_by_text(kind, tokenizer, int(first))
                    if name is not None:
                        found[name] -= found["text"]
            assert p.keys() == q.keys()
            left = [1 - sum(each.values()) for each in (p, q)]
            total += sum(q[name] * math.log(q[name] / p[name]) for name in q)
            total += left[1] * math.log(left[1] / left[0])
            length = max(map(len, alone))
            pairs = zip(*(sorted(each + [0.0] * (length - len(each)), reverse=True) for each in alone), strict=True)
            distance += sum(abs(one - two) for one, two in pairs)
    return total, distance


def spans(own: Tensor, other: Tensor) -> list[tuple[slice, slice]]:
    """Return the shortest common spans, by comparing all positions."""
    ends = [
        (i, j)
        for i in range(len(own) + 1)
        for j in range(len(other) + 1)
        if b"".join(text_of(CHARS, int(t)) for t in own[:i]) == b"".join(text_of(PAIRS, int(t)) for t in other[:j])
        if (i == len(own)) == (j == len(other))
    ]
    return [(slice(a, c), slice(b, d)) for (a, b), (c, d) in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize(("kind", "make"), [("gold", shared_tokens), ("xtoken", common_beginnings)])
def test_the_loss_follows_from_the_texts_of_tokens(kind, make) -> None:
    batch, data = batch_of(CHARS)
    unmatched = 400 if kind == "gold" else 0
    metrics = stage_of(MODELS, data, make(CHARS, PAIRS), unmatched=unmatched).apply(batch)
    assert (metrics["teacher/num_rows"], metrics["teacher/num_unread"]) == (3, 0)
    assert metrics["teacher/num_tokens_in_spans"] == batch.tensors["token_mask"].sum()
    want, distance = by_hand(kind, batch, data)
    count = float(batch.tensors["token_mask"].sum())
    loss, found, _ = loss_of(batch, MODELS[0], uncommon_loss_weight=0.3, gold_loss=True)
    # # Columns of the batch are in float32.
    assert loss == pytest.approx((want + 0.3 * distance) / count, rel=1e-4)
    assert found["unmatched_distance"].item() == pytest.approx(distance / count, rel=1e-5, abs=1e-9)
    assert found["spans_per_token"].item() < 1


def test_few_likely_tokens_give_outcomes_that_exclude_each_other() -> None:
    for make in (shared_tokens, common_beginnings):
        batch, data = batch_of(CHARS)
        stage_of(MODELS, data, make(CHARS, PAIRS), top=5, unmatched=3).apply(batch)
        tensors = batch.tensors
        starts = tensors["span_starts"] == torch.arange(tensors["input_ids"].shape[1])
        ids, slots = tensors["candidate_ids"][starts], tensors["candidate_slots"][starts]
        assert tensors["teacher_slots"].shape[-1] <= 5
        for row in range(len(ids)):
            used = [(int(i), int(s)) for i, s in zip(ids[row, 1:], slots[row, 1:], strict=True) if s != NOWHERE]
            assert len(used) == len(set(used)) == len({token for token, _ in used})
            existing = (tensors["teacher_slots"][starts][row] > -math.inf).nonzero()[:, 0].tolist()
            assert sorted({slot for _, slot in used if slot >= 0}) == existing
        _, metrics, _ = loss_of(batch, MODELS[0], gold_loss=True)
        assert metrics["forward_kl"] > 0 and 0 < metrics["matched_mass"] <= metrics["spans_per_token"]


def test_equal_tokenizers_give_the_loss_and_gradients_of_distillation() -> None:
    student, teacher = Scorer(CHARS, 1), Scorer(CHARS, 5)
    batch, _ = batch_of(CHARS)
    how = TokenComparison(identity(CHARS), 264, 0, False, TEMPERATURE)
    SpanTeacher(student, teacher, "teacher", None, SameTokens(), how, TeacherWeight(2.0)).apply(batch)  # type: ignore[arg-type]
    assert (batch.tensors[TEACHER_WEIGHTS] == torch.full(batch.tensors["input_ids"].shape, 2.0)).all()
    loss, _, gradients = loss_of(batch, student)
    tensors = batch.tensors
    log_p, log_q = (
        torch.log_softmax(model.hf(input_ids=tensors["input_ids"], use_cache=False).logits[:, :-1] / TEMPERATURE, -1)
        for model in (student, teacher)
    )
    want, _ = DistillationLossFn(DistillationLossConfig.build(kl_type="forward"))(
        log_p,
        log_q.detach(),
        None,
        data=tensors,
        global_valid_seqs=3.0,
        global_valid_toks=tensors["token_mask"][:, 1:].sum(),
    )
    student.hf.zero_grad()
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-6)
    for name, parameter in student.hf.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_student_that_is_its_own_teacher_has_no_loss() -> None:
    batch, _ = batch_of(CHARS)
    how = TokenComparison(identity(CHARS), 264, 0, False, TEMPERATURE)
    SpanTeacher(MODELS[0], MODELS[0], "teacher", None, SameTokens(), how).apply(batch)  # type: ignore[arg-type]
    loss, _, gradients = loss_of(batch, MODELS[0])
    assert abs(loss) < 1e-6  # columns of the batch are in float32
    assert max(float(each.abs().max()) for each in gradients.values()) < 1e-6


def test_only_spans_of_one_token_are_compared_if_asked() -> None:
    batch, data = batch_of(CHARS)
    stage_of(MODELS, data, shared_tokens(CHARS, PAIRS), single_tokens_only=True).apply(batch)
    assert (batch.tensors["span_slots"] == -1).all()
    row = batch.rows[1]
    answer = batch.tensors["span_starts"][1, row.prompt_length - 1 : row.length - 1] >= 0
    assert answer.tolist() == [True, True, False, False, True, False, False, True]  # 1 + 98 = 99 <end>


def test_rows_that_the_teacher_cannot_read_have_no_loss() -> None:
    batch, data = batch_of(CHARS)
    half = CHARS.encode("é", add_special_tokens=False)[0]
    for row in batch.rows:
        batch.tensors["input_ids"][row.idx, row.prompt_length :] = half
    metrics = stage_of(MODELS, data, shared_tokens(CHARS, PAIRS)).apply(batch)
    assert metrics["teacher/num_unread"] == 3
    assert set(COLUMNS) <= set(batch.tensors)
    loss, _, _ = loss_of(batch, MODELS[0])
    assert loss == 0


def test_sampled_texts_have_the_probability_that_a_real_teacher_gives_them() -> None:
    """Without distributions: with the difference of each span, the policy's scores add up to those of the teacher."""
    student, teacher = MODELS
    batch, data = batch_of(CHARS)
    batch.tensors["prev_logprobs"] = student.get_logprobs(batch.tensors)["logprobs"]
    stage = AlignedTeacher(
        teacher,  # type: ignore[arg-type]
        "teachers.math",
        TeacherRoutes({"math": "teachers.math"}),
        TeacherPrompts(data, PAIRS),  # type: ignore[arg-type]
        CHARS,
        100,
    )
    metrics = stage.apply(batch)
    for row, datum in zip(batch.rows, data, strict=True):
        prompt = PAIRS.apply_chat_template(datum["chat"]["messages"], tokenize=False, add_generation_prompt=True)
        before = PAIRS.encode(prompt)
        ids = torch.tensor([*before, *PAIRS.encode(ANSWERS[row.idx], add_special_tokens=False), PAIRS.eos_token_id])
        want = teacher.get_logprobs({"input_ids": ids[None]})["logprobs"][0, len(before) :].sum()
        answer = slice(row.prompt_length, row.length)
        own, scores = (batch.tensors[name][row.idx, answer].double() for name in ("prev_logprobs", "teacher_logprobs"))
        of_spans = [mine for mine, _ in spans(batch.tensors["input_ids"][row.idx, answer], ids[len(before) :])]
        got = sum(own[mine].sum() + (scores - own)[mine.start] for mine in of_spans)
        assert got.item() == pytest.approx(want.item(), rel=1e-6)
    mask = batch.tensors["token_mask"]
    difference = ((batch.tensors["prev_logprobs"] - batch.tensors["teacher_logprobs"]) * mask).sum() / mask.sum()
    assert metrics["teachers.math/reverse_kl"] == pytest.approx(difference.item(), rel=1e-6)


def test_the_weight_of_a_teacher_scales_the_difference_from_the_policy() -> None:
    student, teacher = MODELS
    found = []
    for weight in (TeacherWeight(1.0), TeacherWeight(0.25)):
        batch, data = batch_of(CHARS)
        batch.tensors["prev_logprobs"] = own = student.get_logprobs(batch.tensors)["logprobs"]
        routes, prompts = TeacherRoutes({"math": "teachers.math"}), TeacherPrompts(data, PAIRS)  # type: ignore[arg-type]
        AlignedTeacher(teacher, "teachers.math", routes, prompts, CHARS, 100, weight).apply(batch)  # type: ignore[arg-type]
        found.append(batch.tensors["teacher_logprobs"] - own)
    torch.testing.assert_close(found[1], 0.25 * found[0])


WRITTEN = ("5=13, 102", "1+98=99 is é")


def test_written_texts_are_read_with_their_ends() -> None:
    rows = [[*CHARS.encode(text, add_special_tokens=False), CHARS.eos_token_id] for text in WRITTEN]
    tensors = BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True),
        input_lengths=torch.tensor([len(row) for row in rows]),
        token_mask=torch.tensor([[1.0] * len(row) + [0.0] * (len(rows[1]) - len(row)) for row in rows]),
        sample_mask=torch.ones(2),
    )
    reader = WrittenReader(CHARS, PAIRS, 100)
    for index, text in enumerate(WRITTEN):
        row = reader.read(tensors, index, None)
        assert row is not None
        assert row.token_ids.tolist() == [*PAIRS.encode(text, add_special_tokens=False), PAIRS.eos_token_id]
        for own, other in row.spans:
            spelled = [b"".join(text_of(CHARS, token) for token in rows[index][own])]
            spelled.append(b"".join(text_of(PAIRS, token) for token in row.token_ids[other].tolist()))
            assert spelled[0] == spelled[1]
        assert row.spans[-1] == (
            slice(len(rows[index]) - 1, len(rows[index])),
            slice(len(row.token_ids) - 1, len(row.token_ids)),
        )
    tensors["token_mask"][0, :3] = 0  # "5=1"
    row = reader.read(tensors, 0, None)
    assert row is not None and [own.start for own, _ in row.spans] == [4, 5, 6, 7, 9]
    assert WrittenReader(CHARS, PAIRS, 5).read(tensors, 0, None) is None
    batch = StepBatch(tensors)
    how = TokenComparison(common_beginnings(CHARS, PAIRS), 400, 0, False, TEMPERATURE)
    SpanTeacher(*MODELS, "teacher", None, reader, how).apply(batch)  # type: ignore[arg-type]
    loss = CrossTokenizerLossFn(DistillationLossConfig.build(kl_loss_weight=0.0), ce_loss_scale=0.5)
    logits = MODELS[0].hf(input_ids=tensors["input_ids"], use_cache=False).logits / TEMPERATURE
    scores = torch.log_softmax(logits[:, :-1], -1)
    count = tensors["token_mask"][:, 1:].sum()
    got, metrics = loss(
        scores.gather(-1, tensors["candidate_ids"][:, :-1]),
        data=tensors,
        global_valid_seqs=2.0,
        global_valid_toks=count,
    )
    nll = -(scores.gather(-1, tensors["input_ids"][:, 1:, None])[..., 0] * tensors["token_mask"][:, 1:]).sum() / count
    assert got.item() == pytest.approx(0.5 * nll.item()) and metrics["nll"].item() == pytest.approx(nll.item())
    assert metrics["forward_kl"] > 0
