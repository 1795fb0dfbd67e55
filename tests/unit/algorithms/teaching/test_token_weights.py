"""Factors of what a policy learns from a teacher at each token: thinking, classes of users, losses and advantages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_char_tokenizer

from nemo_rl.algorithms.teaching.teachers import write_scores, write_weight
from nemo_rl.algorithms.teaching.token_weights import EQUAL, TeacherWeight, weight_of
from nemo_rl.config import (
    DistillationLossConfig,
    DistillationMasterConfig,
    GRPOMasterConfig,
    TokenWeightsConfig,
    load_config,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossInputType, LossType
from nemo_rl.losses.supervised import TEACHER_WEIGHTS, DistillationLossFn
from nemo_rl.utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[4] / "examples/configs"
SCHEMAS = {"distillation_math_cpu": DistillationMasterConfig, "grpo_opd_cpu": GRPOMasterConfig}
HERE = "test_token_weights"


class Positions:
    """A user's class: the factor of a token is its position times `step`."""

    def __init__(self, step: float = 1.0) -> None:
        self.step = step
        self.turns: list[list[tuple[int, int]]] = []

    def factors(self, token_ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[float]:
        self.turns.append(list(turns))
        return [self.step * position for position in range(len(token_ids))]


class TooShort(Positions):
    """A class that forgets a token."""

    def factors(self, token_ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[float]:
        return super().factors(token_ids, turns)[1:]


class Negative(Positions):
    """A class whose factors are below 0."""

    def factors(self, token_ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[float]:
        return [-1.0] * len(token_ids)


def made(row: float = 1.0, **keys: Any) -> TeacherWeight:
    return TeacherWeight.make(row, TokenWeightsConfig.build(**keys), make_char_tokenizer(), "teacher.token_weights")


def rows_of(*rows: Sequence[tuple[str, bool]]) -> BatchedDataDict[Any]:
    """A batch of rows, each of texts that count or do not, in tokens of one character."""
    tokenizer, ids, masks = make_char_tokenizer(), [], []
    for row in rows:
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text, _ in row]
        ids.append(torch.tensor(sum(tokens, [])))
        masks.append(
            torch.cat([torch.full((len(part),), float(on)) for part, (_, on) in zip(tokens, row, strict=True)])
        )
    pad = torch.nn.utils.rnn.pad_sequence
    return BatchedDataDict(
        input_ids=pad(ids, batch_first=True),
        input_lengths=torch.tensor([len(row) for row in ids]),
        token_mask=pad(masks, batch_first=True),
        sample_mask=torch.ones(len(rows)),
    )


def test_tokens_between_the_tags_have_the_factor_of_thinking() -> None:
    rows = rows_of(
        [("1+2=", False), ("<think>ab</think>3", True)],
        [("1+2=<think>", False), ("abc</think>3", True)],  # the prompt opens the thinking
        [("1+2=", False), ("<think>abc", True), ("+", False), ("4", True)],  # never closed, and a second turn
    )
    weight = made(2.0, name="thinking", thinking=0.25, answer=0.5)
    found = weight.of(rows, [0, 1, 2])
    assert found is not None and found.shape == rows["input_ids"].shape
    turns = [
        found[i, : rows["input_lengths"][i]][rows["token_mask"][i, : rows["input_lengths"][i]] != 0] for i in range(3)
    ]
    assert turns[0].tolist() == [1.0] * 7 + [0.5] * 2 + [1.0] * 9
    assert turns[1].tolist() == [0.5] * 3 + [1.0] * 9
    assert turns[2].tolist() == [1.0] * 7 + [0.5] * 3 + [1.0]


def test_a_teacher_without_weights_writes_nothing() -> None:
    rows = rows_of([("1", False), ("23", True)])
    assert EQUAL.of(rows, [0]) is None and made().of(rows, [0]) is None
    write_weight(rows, EQUAL, [0])
    assert TEACHER_WEIGHTS not in rows


def test_a_class_of_a_user_gets_the_turns_and_its_arguments() -> None:
    rows = rows_of([("12", False), ("34", True), ("5", False), ("6", True)], [("1", False), ("2", True)])
    weight = made(3.0, name=f"{HERE}.Positions", kwargs={"step": 0.5})
    found = weight.of(rows, [1, 0])
    assert found is not None
    assert found[1].tolist() == [0.0, 1.5, 3.0, 4.5, 6.0, 7.5] and found[0, :2].tolist() == [0.0, 1.5]
    assert weight.tokens.turns == [[(1, 2)], [(2, 4), (5, 6)]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "error"),
    [("TooShort", r"return 3 finite.*it returned 2: \[1"), ("Negative", r"it returned 3: \[-1")],
)
def test_other_than_one_factor_for_each_token_is_an_error(name: str, error: str) -> None:
    rows = rows_of([("1", False), ("23", True)])
    with pytest.raises(ConfigError, match=error):
        made(name=f"{HERE}.{name}").of(rows, [0])


def test_advantages_have_the_factors_of_their_teachers() -> None:
    """Two teachers of one batch: `p + factor (q - p)`, so the advantage `q - p` gets the factor."""
    rows = rows_of([("1", False), ("23", True)], [("1", False), ("23", True)])
    rows["prev_logprobs"] = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    reverse_kl = write_scores(rows, torch.full((1, 3), -2.0), [0], made(2.0, name=f"{HERE}.Positions"))
    write_scores(rows, torch.full((1, 3), -1.0), [1])
    gaps = rows["teacher_logprobs"] - rows["prev_logprobs"]
    assert gaps[0, 1:].tolist() == [2 * 1 * -1.0, 2 * 2 * 0.0]
    assert gaps[1, 1:].tolist() == [2.0, 3.0]
    assert reverse_kl == pytest.approx((1.0 + 0.0) / 2)


def test_the_loss_has_the_factors_of_its_tokens() -> None:
    """Two teachers, one with factors of tokens: by hand over the whole vocabulary in float64."""
    rows = rows_of([("1", False), ("234", True)], [("1", False), ("23", True)], [("1", False), ("456", True)])
    write_weight(rows, TeacherWeight(0.5), [0])
    write_weight(rows, made(2.0, name=f"{HERE}.Positions"), [2, 1])
    assert rows[TEACHER_WEIGHTS].tolist() == [
        [0.5] * 4,
        [0, 2, 4, 2],
        [0, 2, 4, 6],
    ]  # padding has the factor of the row
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 3, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    loss_fn = DistillationLossFn(DistillationLossConfig.build(kl_type="forward"))
    loss, _ = loss_fn(student, teacher, None, rows, 3.0, 8.0)
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    factors = torch.tensor([[0.5, 0.5, 0.5], [2.0, 4.0, 0.0], [2.0, 4.0, 6.0]], dtype=torch.float64)
    assert loss.item() == pytest.approx((factors * divergence).sum().item() / 8, rel=1e-12)


class OverAllTokens:
    """The loss as a function of the student's logits over the whole vocabulary."""

    loss_type, input_type, needs_reference = LossType.TOKEN_LEVEL, LossInputType.DISTILLATION, False

    def __call__(self, logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        loss_fn = DistillationLossFn(DistillationLossConfig.build(kl_type="mixed"))
        args = (logits.log_softmax(-1), data["teacher"][:, :-1], None, data, global_valid_seqs, global_valid_toks)
        return loss_fn(*args)


def test_the_loss_with_factors_does_not_depend_on_the_batch_split() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(5, 4, 7, generator=generator, dtype=torch.float64)[:, :3], torch.randn(5, 4, 7)
    data = {
        "teacher": teacher.double(),
        "token_mask": torch.ones(5, 4),
        "sample_mask": torch.ones(5),
        TEACHER_WEIGHTS: torch.rand(5, 4, generator=generator),
    }
    check_invariance(OverAllTokens(), logits, data)


@pytest.mark.parametrize(
    ("file", "override", "error"),
    [
        (
            "distillation_math_cpu",
            "teacher.token_weights={name: thinking, thinking: 0, answer: 0}",
            "nothing is learned",
        ),
        (
            "distillation_math_cpu",
            "teacher.token_weights={name: thinking, thinking_tags: [a, a]}",
            "two different texts",
        ),
        ("distillation_math_cpu", "+teacher.token_weights.kwargs.step=1", "are arguments of a class of your own"),
        ("grpo_opd_cpu", "on_policy_distillation.self_distillation.token_weights.name=thoughts", "thinking"),
    ],
)
def test_wrong_keys_are_refused_by_name(file: str, override: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_config(CONFIGS / f"{file}.yaml", [override], SCHEMAS[file])


def test_a_class_that_does_not_exist_is_refused() -> None:
    file, key = "distillation_math_cpu", "teacher.token_weights.name"
    config = load_config(CONFIGS / f"{file}.yaml", [f"{key}=nowhere.Weights"], DistillationMasterConfig)
    with pytest.raises(ConfigError, match=r"teacher\.token_weights.*nowhere"):
        weight_of(config.teacher, make_char_tokenizer(), "teacher")
