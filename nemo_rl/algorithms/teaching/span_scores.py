"""Write what a teacher with any tokenizer predicts at the beginning of each span, for `losses.cross_tokenizer`.

    row of the step ─► tokens of the teacher, spans ─► teacher: most likely tokens ─► slots ┐
                                                       policy:  most likely tokens ─► candidates ┴► COLUMNS

A slot is a class (`projection`) of at least one of the teacher's most likely tokens. Its candidates are tokens of the
policy in this class: the one that represents the class, and those among the policy's most likely tokens. With as many
tokens as the vocabularies have, nothing is left out. Invariants: each slot has a candidate, and no token is twice in a
slot. Candidates that are in no class are compared by size, as are such tokens of the teacher.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.projection import NO_CLASS, Projection
from nemo_rl.algorithms.teaching.prompts import batch_of
from nemo_rl.algorithms.teaching.teachers import TeacherRoutes, write_weight
from nemo_rl.algorithms.teaching.text_alignment import TeacherRow
from nemo_rl.algorithms.teaching.token_weights import EQUAL, TeacherWeight
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.cross_tokenizer import (
    COLUMNS,
    IN_NO_CLASS,
    NO_SPAN,
    NOWHERE,
    WITHOUT_SLOT,
    of_teacher,
    without,
)
from nemo_rl.losses.supervised import TEACHER_WEIGHTS
from nemo_rl.models.policy.interfaces import ScoringModel

_LAST = 2**62
"""Class of slots that do not exist. They come last."""


class Reader(Protocol):
    """Reads samples in the tokens of a teacher (`text_alignment.TextReader`)."""

    def read(self, tensors: BatchedDataDict[Any], index: int, row: Trajectory | None, /) -> TeacherRow | None:
        """Return a row of a batch in the teacher's tokens, or None if the teacher cannot read it."""


@dataclass(frozen=True)
class SameTokens:
    """Reads rows for a teacher with the policy's tokenizer: its tokens are those of the policy."""

    def read(self, tensors: BatchedDataDict[Any], index: int, row: Trajectory | None) -> TeacherRow:
        """Return the row with a span for each token that counts."""
        written = (tensors["token_mask"][index] != 0).nonzero()[:, 0].tolist()
        each = [slice(place, place + 1) for place in written if place > 0]
        length = int(tensors["input_lengths"][index])
        return TeacherRow(tensors["input_ids"][index, :length], list(zip(each, each, strict=True)))


@dataclass(frozen=True)
class TokenComparison:
    """Settings of the comparison of the tokens of a policy and of a teacher."""

    projection: Projection
    """Classes of tokens."""
    top: int
    """Number of most likely tokens of each model."""
    unmatched: int
    """Number of tokens in no class that are compared by size."""
    single_tokens_only: bool
    """Whether only spans of one token on both sides are compared."""
    temperature: float
    """Temperature of both distributions."""

    @property
    def num_student(self) -> int:
        """Number of token ids of the policy."""
        return len(self.projection.indices)

    @property
    def num_teacher(self) -> int:
        """Number of token ids of the teacher."""
        return len(self.projection.teacher_classes)


@dataclass(frozen=True)
class SpanTeacher:
    """Stage that writes the rows of one teacher into `COLUMNS` (`runtime.run.Stage`)."""

    policy: ScoringModel
    teacher: ScoringModel
    role: str
    """Name of the teacher in the run."""
    routes: TeacherRoutes | None
    """Choice of the teacher of each row, by its role. If None, the teacher reads all rows."""
    reader: Reader
    comparison: TokenComparison
    weight: TeacherWeight = EQUAL
    """Factors of the loss of the teacher's rows."""
    number: int = 0
    """Number of the teacher, if several teachers read a row (`losses.cross_tokenizer.of_teacher`)."""

    name = "teacher_logprob_inference"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the models that the stage uses."""
        return ("policy", self.role)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write the columns that the loss needs. Rows that the teacher cannot read have no spans.

        Returns:
            Metrics: the numbers of rows, of rows that the teacher could not read, and of tokens in a span.
        """
        tensors, rows, routes = batch.tensors, batch.rows, self.routes
        indices = list(range(tensors.size)) if routes is None else routes.rows_of(self.role, rows)
        read = {index: self.reader.read(tensors, index, rows[index] if rows else None) for index in indices}
        known = {index: row for index, row in read.items() if row is not None}
        spans = Spans.of(known, single_tokens_only=self.comparison.single_tokens_only)
        write_weight(tensors, self.weight, indices, of_teacher(TEACHER_WEIGHTS, self.number))
        columns = self._compare(tensors, [row.token_ids for row in known.values()], spans) if len(spans.rows) else {}
        write_spans(tensors, spans, columns, self.number)
        return {
            f"{self.role}/num_rows": float(len(indices)),
            f"{self.role}/num_unread": float(len(read) - len(known)),
            f"{self.role}/num_tokens_in_spans": float(spans.lengths.sum()),
        }

    def _compare(
        self, tensors: BatchedDataDict[Any], teacher_rows: Sequence[Tensor], spans: "Spans"
    ) -> dict[str, Tensor]:
        """Ask both models for their most likely tokens, and return the columns of each span."""
        how, rows = self.comparison, batch_of(teacher_rows)
        of_both = {
            "student": (self.policy, tensors.select_indices(spans.row_ids), how.num_student),
            "teacher": (self.teacher, rows, how.num_teacher),
        }
        top = {
            name: model.get_topk_logits(
                data, min(how.top, num_tokens), vocab_size=num_tokens, temperature=how.temperature
            )
            for name, (model, data, num_tokens) in of_both.items()
        }
        at_teacher = (spans.places, spans.teacher_starts - 1)
        found = Predictions(
            student_ids=top["student"]["topk_indices"][spans.places, spans.starts],
            student_first=tensors["input_ids"][spans.rows, spans.starts + 1],
            teacher_ids=top["teacher"]["topk_indices"][at_teacher],
            teacher_logprobs=top["teacher"]["topk_logits"][at_teacher],
            teacher_first=rows["input_ids"][spans.places, spans.teacher_starts],
            span_logprobs=self._span_logprobs(rows, spans),
            is_whole=spans.is_whole,
        )
        return columns_of(found, how)

    def _span_logprobs(self, rows: BatchedDataDict[Any], spans: "Spans") -> Tensor:
        """Return the teacher's log-probability of the text of each span `[N]`, or 0 if no span has several tokens."""
        if not spans.is_whole.any():
            return torch.zeros(len(spans.rows))
        sums = self.teacher.get_logprobs(rows)["logprobs"].double().cumsum(1)
        last = spans.teacher_starts + spans.teacher_lengths - 1
        return (sums[spans.places, last] - sums[spans.places, spans.teacher_starts - 1]).float()


@dataclass(frozen=True)
class Spans:
    """The N spans of some rows of a batch."""

    row_ids: list[int]
    """Rows of the batch that the teacher reads."""
    places: Tensor
    """`[N]` int64, index of the span's row in `row_ids`."""
    starts: Tensor
    """`[N]` int64, position in the policy's row of the token before the span."""
    lengths: Tensor
    """`[N]` int64, number of the policy's tokens."""
    teacher_starts: Tensor
    """`[N]` int64, position in the teacher's row of the span's first token."""
    teacher_lengths: Tensor
    """`[N]` int64, number of the teacher's tokens."""

    @classmethod
    def of(cls, rows: Mapping[int, TeacherRow], *, single_tokens_only: bool) -> "Spans":
        """Collect the spans of rows, by their index in the batch."""
        found = [
            (place, own.start - 1, own.stop - own.start, other.start, other.stop - other.start)
            for place, row in enumerate(rows.values())
            for own, other in row.spans
            if own.start > 0 and other.start > 0 and own.stop > own.start and other.stop > other.start
            if not single_tokens_only or (own.stop - own.start, other.stop - other.start) == (1, 1)
        ]
        return cls(list(rows), *torch.tensor(found, dtype=torch.int64).reshape(-1, 5).unbind(1))

    @property
    def rows(self) -> Tensor:
        """`[N]` int64, index of the span's row in the batch."""
        return torch.tensor(self.row_ids, dtype=torch.int64)[self.places]

    @property
    def is_whole(self) -> Tensor:
        """`[N]` bool, whether the text of the span is several tokens of one of the models."""
        return (self.lengths > 1) | (self.teacher_lengths > 1)


@dataclass(frozen=True)
class Predictions:
    """Predictions of both models at the beginning of N spans."""

    student_ids: Tensor
    """`[N, s]` int64, most likely tokens of the policy."""
    student_first: Tensor
    """`[N]` int64, first token of the span."""
    teacher_ids: Tensor
    """`[N, t]` int64, most likely tokens of the teacher."""
    teacher_logprobs: Tensor
    """`[N, t]`, their log-probabilities, largest first."""
    teacher_first: Tensor
    """`[N]` int64, the teacher's first token of the span."""
    span_logprobs: Tensor
    """`[N]`, the teacher's log-probability of the text of the span."""
    is_whole: Tensor
    """`[N]` bool, whether the text of the span is an outcome of its own."""


def columns_of(found: Predictions, how: TokenComparison) -> dict[str, Tensor]:
    """Return the columns of each span, `[N, ...]`, without `span_starts`."""
    classes_Nt = how.projection.teacher_classes[found.teacher_ids]
    slots_NC, logprobs_NC = _slots(classes_Nt, found.teacher_logprobs)
    ids_Ns = _with_first(found.student_ids, found.student_first)
    candidates = [*_representatives(slots_NC, how.projection), *_members(ids_Ns, slots_NC, how.projection)]
    ids, numbers, logs = (torch.cat(parts, -1) for parts in (candidates[0::3], candidates[1::3], candidates[2::3]))
    numbers, sorted_NU = _by_size(found, how, ids, numbers)
    span_slots_N, logprobs_NC = _spans_apart(found, how.projection, slots_NC, logprobs_NC)
    first = (found.student_first[:, None], torch.full((len(ids), 1), NOWHERE), torch.zeros(len(ids), 1))
    ids, numbers, logs = (torch.cat(pair, -1) for pair in zip(first, (ids, numbers, logs), strict=True))
    kept = _kept(numbers)
    return {
        "candidate_ids": ids.gather(-1, kept),
        "candidate_slots": numbers.gather(-1, kept),
        "candidate_log_weights": logs.gather(-1, kept),
        "teacher_slots": logprobs_NC[:, : max(int((slots_NC < _LAST).sum(-1).max()), 1)].float(),
        "teacher_sorted": sorted_NU.float(),
        "span_slots": span_slots_N,
        "span_logprobs": torch.where(found.is_whole, found.span_logprobs, 0.0),
    }


def _slots(classes_Nt: Tensor, logprobs_Nt: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class of each slot `[N, C]`, in rising order, and the teacher's log-probability of it."""
    classes_Nt, order = classes_Nt.where(classes_Nt != NO_CLASS, _LAST).sort(dim=-1, stable=True)
    logprobs_Nt = logprobs_Nt.double().gather(-1, order)
    is_new = classes_Nt[:, 1:] != classes_Nt[:, :-1]
    slot_Nt = torch.cat([torch.zeros_like(classes_Nt[:, :1]), is_new.cumsum(-1)], -1)
    slots_NC = torch.full_like(classes_Nt, _LAST).scatter(-1, slot_Nt, classes_Nt)
    sums_NC = torch.zeros_like(logprobs_Nt).scatter_add(-1, slot_Nt, logprobs_Nt.exp())
    return slots_NC, torch.where(slots_NC < _LAST, sums_NC.log(), -math.inf)


def _with_first(ids_Ns: Tensor, first_N: Tensor) -> Tensor:
    """Add the first token of the span to tokens, or -1 if it is one of them."""
    missing_N = ~(ids_Ns == first_N[:, None]).any(-1)
    return torch.cat([ids_Ns, first_N.where(missing_N, -1)[:, None]], -1)


def _representatives(slots_NC: Tensor, projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, slots and logarithms of weights of the tokens that represent the slots."""
    tokens, logs = projection.representatives
    exists = slots_NC < _LAST
    classes = slots_NC.where(exists, 0)
    numbers = torch.arange(slots_NC.shape[1]).expand_as(slots_NC)
    return tokens[classes].where(exists, 0), numbers.where(exists, NOWHERE), logs[classes].where(exists, 0.0)


def _members(ids_Ns: Tensor, slots_NC: Tensor, projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, slots and logarithms of weights of likely tokens in a slot that do not represent it.

    Tokens in no class have the slot `IN_NO_CLASS`, and all others `NOWHERE`.
    """
    exists = ids_Ns >= 0
    ids_Ns, width = ids_Ns.where(exists, 0), projection.indices.shape[1]
    classes = projection.indices[ids_Ns].where(exists[..., None], NO_CLASS).flatten(1)
    logs = projection.weights[ids_Ns].flatten(1).log()
    ids = ids_Ns.repeat_interleave(width, -1)
    numbers = _slot_of(classes, slots_NC)
    represents = projection.representatives[0][classes.clamp(min=0)] == ids
    numbers = numbers.where(~represents, NOWHERE)
    is_alone = (projection.indices[ids_Ns] == NO_CLASS).all(-1) & exists
    alone = (is_alone[..., None] & (torch.arange(width) == 0)).flatten(1)  # each token once
    used = numbers >= 0
    return ids, numbers.where(~alone, IN_NO_CLASS), logs.where(used, 0.0)


def _slot_of(classes: Tensor, slots_NC: Tensor) -> Tensor:
    """Return the number of the slot of each class `[N, ...]`, or `NOWHERE`."""
    numbers = torch.searchsorted(slots_NC, classes).clamp(max=slots_NC.shape[1] - 1)
    return numbers.where((slots_NC.gather(-1, numbers) == classes) & (classes >= 0), NOWHERE)


def _by_size(found: Predictions, how: TokenComparison, ids: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots of candidates, and the teacher's sorted probabilities, of at most U tokens in no class each.

    The first token of a span whose text is an outcome of its own is left out on both sides.
    """
    apart = found.is_whole[:, None]
    alone = (numbers == IN_NO_CLASS) & ~(apart & (ids == found.student_first[:, None]))
    kept = alone & (alone.cumsum(-1) <= how.unmatched)
    numbers = numbers.where((numbers != IN_NO_CLASS) | kept, NOWHERE)
    others = how.projection.teacher_classes[found.teacher_ids] == NO_CLASS
    others &= ~(apart & (found.teacher_ids == found.teacher_first[:, None]))
    probs = torch.where(others, found.teacher_logprobs.double(), -math.inf).exp()
    missing = max(how.unmatched - probs.shape[-1], 0)
    probs_NU = torch.nn.functional.pad(probs, (0, missing)).topk(how.unmatched, dim=-1).values
    most = max(int((probs_NU > 0).sum(-1).max()), int(kept.sum(-1).max()))
    return numbers, probs_NU[:, :most]


def _spans_apart(
    found: Predictions, projection: Projection, slots_NC: Tensor, logprobs_NC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `span_slots` `[N]`, and the teacher's slots after the text of each span is taken away from its class."""
    own = _slot_of(projection.indices[found.student_first, :1], slots_NC)[:, 0]
    span_slots_N = torch.where(found.is_whole, own.where(own >= 0, WITHOUT_SLOT), NO_SPAN)
    other = _slot_of(projection.teacher_classes[found.teacher_first][:, None], slots_NC)[:, 0]
    is_known = (found.teacher_ids == found.teacher_first[:, None]).any(-1)
    takes_N = found.is_whole & is_known & (other >= 0)
    of_span = (torch.arange(slots_NC.shape[1]) == other[:, None]) & takes_N[:, None]
    reduced = without(logprobs_NC, found.span_logprobs.double()[:, None], of_span)
    return span_slots_N, torch.where(of_span, reduced, logprobs_NC)


def _kept(numbers: Tensor) -> Tensor:
    """Return, for each span, the columns of candidates that are used, with the first column first."""
    used = numbers != NOWHERE
    used[:, 0] = True
    return (~used).to(torch.int8).argsort(dim=-1, stable=True)[:, : int(used.sum(-1).max())]


def write_spans(tensors: BatchedDataDict[Any], spans: Spans, columns: Mapping[str, Tensor], number: int = 0) -> None:
    """Write the columns of spans into those of a batch, which are added or widened as needed.

    Args:
        number: Number of the teacher (`SpanTeacher.number`).
    """
    shape, keys = tensors["input_ids"].shape, {name: of_teacher(name, number) for name in COLUMNS}
    for column, default in COLUMNS.items():
        values, name = columns.get(column), keys[column]
        kind = torch.int64 if isinstance(default, int) else torch.float32
        if name not in tensors:
            further = () if column.startswith("span_") else (0,)
            tensors[name] = torch.full((*shape, *further), default, dtype=kind)
        if values is None:
            continue
        if values.ndim > 1:
            missing = (0, max(values.shape[1] - tensors[name].shape[2], 0))
            tensors[name] = torch.nn.functional.pad(tensors[name], missing, value=default)
            tensors[name][spans.rows, spans.starts, : values.shape[1]] = values.to(kind)
        else:
            tensors[name][spans.rows, spans.starts] = values.to(kind)
    ids = keys["candidate_ids"]
    if not tensors[ids].shape[2]:
        for column in ("candidate_ids", "candidate_slots", "candidate_log_weights"):
            tensors[keys[column]] = torch.nn.functional.pad(tensors[keys[column]], (0, 1), value=COLUMNS[column])
    tensors[ids][:, :-1, 0] = tensors["input_ids"][:, 1:]
    _write_starts(tensors[keys["span_starts"]], spans)


def _write_starts(span_starts_BT: Tensor, spans: Spans) -> None:
    """Write the position at which the span of each token begins."""
    offsets = torch.arange(int(spans.lengths.sum())) - (spans.lengths.cumsum(0) - spans.lengths).repeat_interleave(
        spans.lengths
    )
    rows = spans.rows.repeat_interleave(spans.lengths)
    starts = spans.starts.repeat_interleave(spans.lengths)
    span_starts_BT[rows, starts + offsets] = starts
