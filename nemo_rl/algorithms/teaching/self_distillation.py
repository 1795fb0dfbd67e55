"""Let the policy be its own teacher, with a prompt that tells it more than the student sees.

    row of the data ─► prompt with the context ─┐
    sampled tokens of the row ──────────────────┴► policy.get_logprobs ─► teacher_logprobs [B, T], at student's places

Self-distillation from privileged context: the hint of a row, or a right answer of the same group (arXiv 2601.20802).
Invariant: teacher and student score the same sampled tokens. A sample without context has the student as its teacher,
so its advantage is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts, batch_of
from nemo_rl.algorithms.teaching.teachers import TEACHER_LOGPROBS, write_scores
from nemo_rl.algorithms.teaching.token_weights import EQUAL, TeacherWeight
from nemo_rl.config import SelfDistillationConfig
from nemo_rl.data.interfaces import Chat, DatumSpec, Message
from nemo_rl.data.packing import PROMPT_GROUPS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory, is_right
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.utils.errors import ConfigError

SOLUTION = "solution"
"""Field of a context: the text of a right answer to the same prompt, by another sample of the step."""


@dataclass(frozen=True)
class PrivilegedPrompts:
    """Render prompts with a context that the student does not see."""

    config: SelfDistillationConfig
    prompts: TeacherPrompts

    def check(self) -> None:
        """Render the first row, so that mistakes are found before anything starts.

        Raises:
            ConfigError: the context does not change the prompt, or names a field that the row lacks.
            DataError: the row does not say what its prompt was rendered from.
        """
        datum = self.prompts.data[0]
        if torch.equal(self._ids(datum, self._context(datum, "...")), datum["message_log"][0]["token_ids"]):
            raise ConfigError(
                "on_policy_distillation.self_distillation.context does not change the prompt of the first row, so "
                "teacher and student would see the same. Name a field of the row, for example {ground_truth}."
            )

    def ids_of(self, row: Trajectory, solution: str | None) -> Tensor | None:
        """Return the token ids of a sample's prompt with its context, `[t]` int64, or None if it has no context.

        Raises:
            DataError: the sample's prompt is not that of its row of the data.
        """
        if solution is None and self.config.needs_solution:
            return None
        datum = self.prompts.row_of(row)
        return self._ids(datum, self._context(datum, solution))

    def _context(self, datum: DatumSpec, solution: str | None) -> str:
        """Return the text of the context of a row."""
        fields = {**(datum["extra_env_info"] or {}), SOLUTION: solution}
        try:
            return (self.config.context or "").format_map(fields)
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(f"{{{name}}}" for name in fields)
            raise ConfigError(
                f"on_policy_distillation.self_distillation.context cannot be filled in for row {datum['idx']}: "
                f"{type(error).__name__}: {error}. There are: {known}. Write literal braces twice."
            ) from error

    def _ids(self, datum: DatumSpec, context: str) -> Tensor:
        return self.prompts.ids(datum, lambda chat: with_context(chat, context, self.config.message))


def with_context(chat: Chat, context: str, role: str) -> Chat:
    """Return a copy of a chat with a text at the end of its last user message, or of its system message."""
    messages: list[Message] = [dict(message) for message in chat["messages"]]
    found = next((message for message in reversed(messages) if message["role"] == role), None)
    if found is None:
        added = {"role": role, "content": context}
        messages = [added, *messages] if role == "system" else [*messages, added]
    elif isinstance(found["content"], str):
        found["content"] = f"{found['content']}\n\n{context}"
    else:
        found["content"] = [*found["content"], {"type": "text", "text": f"\n\n{context}"}]
    return {**chat, "messages": messages}


@dataclass(frozen=True)
class SelfTeacher:
    """Stage that scores samples with the policy and privileged prompts (`runtime.run.Stage`)."""

    policy: ScoringModel
    prompts: PrivilegedPrompts
    longest: int
    """Largest number of tokens of a row. Samples whose teacher would read more have no teacher."""
    weight: TeacherWeight = EQUAL
    """Factors of the advantages."""

    name = "teacher_logprob_inference"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `teacher_logprobs` `[B, T]` float32. The batch must hold `prev_logprobs`.

        Returns:
            Metrics: the number of samples with a teacher, of samples whose teacher would read too many tokens, and the
            mean of `log p - log q` over the tokens of samples with a teacher.
        """
        tensors, rows = batch.tensors, batch.rows
        solutions = solutions_of(rows) if self.prompts.config.needs_solution else [None] * len(rows)
        prompts = [self.prompts.ids_of(row, solution) for row, solution in zip(rows, solutions, strict=True)]
        answers = [tensors["input_ids"][index, row.prompt_length : row.length] for index, row in enumerate(rows)]
        known = {index: torch.cat([ids, answers[index]]) for index, ids in enumerate(prompts) if ids is not None}
        read = {index: ids for index, ids in known.items() if len(ids) <= self.longest}
        tensors[TEACHER_LOGPROBS] = tensors["prev_logprobs"].clone()
        reverse_kl = self._score(tensors, read, answers) if read else 0.0
        return {
            "self_teacher/num_rows": float(len(read)),
            "self_teacher/num_too_long": float(len(known) - len(read)),
            "self_teacher/reverse_kl": reverse_kl,
        }

    def _score(self, tensors: BatchedDataDict[Any], read: Mapping[int, Tensor], answers: Sequence[Tensor]) -> float:
        """Score the rows that the teacher reads, and write the scores at the places of the student's tokens.

        Args:
            read: The teacher's token ids of each row, which end with the answer.
            answers: The token ids of the answers of all rows.

        Returns:
            The result of `write_scores`.
        """
        indices, data = list(read), batch_of(list(read.values()))
        data[PROMPT_GROUPS] = tensors[PROMPT_GROUPS][indices]
        if self.prompts.config.weights == "initial":
            found_RT = self.policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        else:
            found_RT = self.policy.get_logprobs(data)["logprobs"]
        scores_RT, lengths = tensors["prev_logprobs"][indices], tensors["input_lengths"].tolist()
        for place, (index, ids) in enumerate(read.items()):
            start = lengths[index] - len(answers[index])
            scores_RT[place, start : lengths[index]] = found_RT[place, len(ids) - len(answers[index]) : len(ids)]
        return write_scores(tensors, scores_RT, indices, self.weight)


def solutions_of(rows: Sequence[Trajectory]) -> list[str | None]:
    """Return, for each sample, the text of the first right answer of another sample of its group, or None."""
    right: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if is_right(row.penalized_reward):
            right.setdefault(row.group_index, []).append(index)
    found: list[str | None] = []
    for index, row in enumerate(rows):
        others = [each for each in right.get(row.group_index, ()) if each != index]
        found.append(rows[others[0]].response_text if others else None)
    return found
