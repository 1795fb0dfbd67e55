"""Score the samples of a step with teachers, and check that teachers have the student's tokens.

    rows of the step ─► TeacherRoutes ─► TeacherLogprobs of each teacher ─► teacher_logprobs [B, T]     (GRPO)
                                     TeacherScores of each teacher ───► teacher_topk_* [B, T, k]    (distillation)

Each teacher is a frozen model of the run and a stage of the step, so teachers on the policy's devices take
turns. Invariant: each row is scored by exactly one teacher, whose weights never change.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.token_weights import EQUAL, TeacherWeight
from nemo_rl.config import OnPolicyDistillationConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.reductions import masked_mean
from nemo_rl.losses.supervised import TEACHER_WEIGHTS
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

TEACHER_LOGPROBS = "teacher_logprobs"
"""Key of a batch: `[B, T]` float32, each token's log-probability under the teacher of its row."""
SKIP_CHECK = "NRL_SKIP_DISTILLATION_TOKENIZER_CHECK"
"""Environment variable that turns an error about different vocabularies into a warning. The name is that of NeMo RL."""
_NUM_SHOWN = 3


def role_of(teacher: str) -> str:
    """Return the name of a teacher's model in the run."""
    return f"teachers.{teacher}"


@dataclass(frozen=True)
class TeacherRoutes:
    """Choice of the teacher of each sample, by the names of its agent and of its environment."""

    roles: Mapping[str, str]
    """Role of the teacher of each agent or environment, by name."""
    default: str | None = None
    """Role of the teacher of all other samples. If None, there must be no others."""

    @classmethod
    def of(cls, given: OnPolicyDistillationConfig, teachers: Mapping[str, Any]) -> "TeacherRoutes":
        """Return the routes of a GRPO run.

        Args:
            teachers: the section `teachers`.
        """
        routes = {name: role_of(teacher) for name, teacher in given.routes(teachers).items()}
        alias = None if given.strict_agent_name_match else given.default_teacher_alias
        return cls(routes, None if alias is None else routes[alias])

    def rows_of(self, role: str, rows: Sequence[Trajectory]) -> list[int]:
        """Return the indices of the rows that a teacher scores.

        Raises:
            DataError: no teacher belongs to one of the rows.
        """
        return [index for index, row in enumerate(rows) if self.teacher_of(row) == role]

    def teacher_of(self, row: Trajectory) -> str:
        """Return the role of the teacher that scores a row.

        Raises:
            DataError: no teacher belongs to the row.
        """
        info = row.extra_env_info if isinstance(row.extra_env_info, Mapping) else {}
        names = [name for name in (_agent_of(info), row.task_name) if name is not None]
        found = next((self.roles[name] for name in names if name in self.roles), self.default)
        if found is None:
            raise DataError(
                f"a sample of {' and '.join(map(repr, names))} has no teacher; there are teachers for "
                f"{', '.join(map(repr, sorted(self.roles)))}. Add it to "
                "on_policy_distillation.teacher_model_by_agent_name, or set "
                "on_policy_distillation.default_teacher_alias (and strict_agent_name_match=false)."
            )
        return found


def _agent_of(info: Mapping[str, Any]) -> str | None:
    """Return the name of the agent in a row of NeMo Gym, or None."""
    for value in (info, *info.values()):
        agent = value.get("agent_ref") if isinstance(value, Mapping) else None
        if isinstance(agent, Mapping) and isinstance(agent.get("name"), str):
            return str(agent["name"])
    return None


class TokenScorer(Protocol):
    """Interface of a model that gives log-probabilities of tokens: a model of the run, or an endpoint."""

    def get_logprobs(self, data: BatchedDataDict[Any], /) -> BatchedDataDict[Any]:
        """Return the log-probability of each token of the rows."""


@dataclass(frozen=True)
class TeacherLogprobs:
    """Stage that adds the log-probabilities of one teacher to its rows (`runtime.run.Stage`)."""

    teacher: TokenScorer
    """The model that scores."""
    role: str
    """Name of the model in the run."""
    routes: TeacherRoutes
    """Choice of the teacher of each row, by its role."""
    weight: TeacherWeight = EQUAL
    """Factors of the advantages (`write_scores`)."""

    name = "teacher_logprob_inference"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the model that the stage uses."""
        return (self.role,)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write the rows of `teacher_logprobs` `[B, T]` float32 that belong to this teacher. Other rows stay.

        The batch must hold `prev_logprobs`.

        Returns:
            Metrics: the number of rows, and the mean of `log p - log q` over their tokens that count, for policy p and
            teacher q. It estimates `KL(p || q)` per token.
        """
        tensors = batch.tensors
        rows = self.routes.rows_of(self.role, batch.rows)
        metrics = {f"{self.role}/num_rows": float(len(rows))}
        if not rows:
            return metrics
        scores_RT = self.teacher.get_logprobs(tensors.select_indices(rows))["logprobs"]
        return metrics | {f"{self.role}/reverse_kl": write_scores(tensors, scores_RT, rows, self.weight)}


@dataclass(frozen=True)
class TeacherScores:
    """Stage that adds the top-k logits of one teacher to its rows (`runtime.run.Stage`)."""

    teacher: ScoringModel
    """The model that scores tokens."""
    k: int
    """Number of logits per token."""
    vocab_size: int | None = None
    """Only ids below this number are returned. None allows all ids."""
    temperature: float = 1.0
    """Temperature that divides the logits, as for the student."""
    role: str = "teacher"
    """Name of the model in the run."""
    routes: TeacherRoutes | None = None
    """Choice of the teacher of each row, by its role. If None, the teacher scores all rows."""
    weight: TeacherWeight = EQUAL
    """Factors of the loss of the teacher's rows."""

    name = "teacher_logprob_inference"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the model that the stage uses."""
        return (self.role,)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `teacher_topk_logits` (float32, divided by the temperature) and `teacher_topk_indices`, `[B, T, k]`."""
        if self.routes is None:
            batch.tensors.update(self._scores(batch.tensors))
            write_weight(batch.tensors, self.weight, range(batch.tensors.size))
            return {}
        rows = self.routes.rows_of(self.role, batch.rows)
        if rows:
            _write_rows(batch.tensors, self._scores(batch.tensors.select_indices(rows)), rows)
        write_weight(batch.tensors, self.weight, rows)
        return {f"{self.role}/num_rows": float(len(rows))}

    def _scores(self, rows: BatchedDataDict[Any]) -> dict[str, Tensor]:
        scored = self.teacher.get_topk_logits(rows, self.k, vocab_size=self.vocab_size)
        return {
            "teacher_topk_logits": scored["topk_logits"] / self.temperature,
            "teacher_topk_indices": scored["topk_indices"],
        }


def write_scores(
    tensors: BatchedDataDict[Any], scores_RT: Tensor, rows: Sequence[int], weight: TeacherWeight = EQUAL
) -> float:
    """Write log-probabilities of a teacher into `teacher_logprobs` of some rows, at least one.

    Args:
        weight: Factors of the difference between the teacher's log-probabilities and those of the policy.

    Returns:
        The mean of `log p - log q` over the tokens of these rows that count, for policy p and teacher q, without the
        factors.
    """
    own_RT, factor_RT = tensors["prev_logprobs"][rows], weight.of(tensors, rows)
    weighted_RT = scores_RT if factor_RT is None else own_RT + factor_RT * (scores_RT - own_RT)
    _write_rows(tensors, {TEACHER_LOGPROBS: weighted_RT}, rows)
    mask_RT = BatchRows.of(tensors).advantage_mask()[rows]
    return float(masked_mean(own_RT - scores_RT, mask_RT))


def write_weight(
    tensors: BatchedDataDict[Any], weight: TeacherWeight, rows: Sequence[int], key: str = TEACHER_WEIGHTS
) -> None:
    """Write the factors of the distillation loss of some rows `[B, T]`, if they are not all 1."""
    factor_RT = weight.of(tensors, rows) if rows else None
    if factor_RT is None:
        return
    if key not in tensors:
        tensors[key] = torch.ones(tensors["input_ids"].shape)
    tensors[key][list(rows)] = factor_RT


def _write_rows(tensors: BatchedDataDict[Any], columns: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Write the values of some rows into columns of a batch. Other rows of a new column are 0."""
    for name, values in columns.items():
        if name not in tensors:
            tensors[name] = torch.zeros(tensors.size, *values.shape[1:], dtype=values.dtype)
        tensors[name][list(rows)] = values


def compare_vocabularies(
    student: TokenizerType, teacher: TokenizerType, student_name: str, teacher_name: str, place: str = "teacher"
) -> None:
    """Check that every token has the same id in both tokenizers.

    Args:
        place: Section of the teacher, for the message.

    Raises:
        ConfigError: A token has different ids. With the environment variable `SKIP_CHECK` this is only logged.
    """
    difference = _difference(student.get_vocab(), teacher.get_vocab())
    if difference is None:
        return
    message = (
        f"{place}.model_name={teacher_name!r} has another vocabulary than policy.model_name={student_name!r}: "
        f"{difference}. Distillation compares probabilities token by token, so both need the same tokens under the "
        "same ids: choose models of one family"
    )
    if os.environ.get(SKIP_CHECK, "0") not in ("", "0", "false"):
        logger.warning("%s. Ignored, because %s is set.", message, SKIP_CHECK)
        return
    raise ConfigError(f"{message}, or set {SKIP_CHECK}=1 if the tokens that differ never occur.")


def _difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Describe how two vocabularies differ, or return None if they do not."""
    if student == teacher:
        return None
    tokens = sorted({*student, *teacher}, key=lambda token: (student.get(token, -1), teacher.get(token, -1)))
    differing = [token for token in tokens if student.get(token) != teacher.get(token)]
    examples = ", ".join(
        f"{token!r} is {_id(teacher, token)} for the teacher and {_id(student, token)} for the student"
        for token in differing[:_NUM_SHOWN]
    )
    return f"{len(differing)} of {len(tokens)} tokens differ, e.g. {examples}"


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"
