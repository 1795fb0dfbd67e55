r"""Check before a run starts that its verifiers accept the known answers of its data sets.

    rows ─► a sample of each data set ─► known answers, by environment ─► its verifier ─► share of right ones

Known answers are graded like a model's, by this library's math environments, not by a user's classes. Invariant: plain
numbers are graded in this process, so that a usual data set costs no time, and others with the environment's deadline.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.schema.env import MathEnvironmentConfig, VLMEnvironmentConfig
from nemo_rl.data.datasets.processed_dataset import RowsWithPlace
from nemo_rl.environments.grading.grade import SOLUTION_MARK, Grade
from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.environments.grading.vlm_rewards import WeightedReward, grade_answers, known_response, weighted_rewards
from nemo_rl.environments.math_environment import MathEnvironment, MathMultiRewardEnvironment
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.vlm_environment import VLMEnvironment
from nemo_rl.environments.workers.loading import load_env_class, own_keys, section_of
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

FIRST_ROWS = 64
"""Number of rows at the beginning of a data set whose known answers are graded."""

SPREAD_ROWS = 64
"""Number of further graded rows, which are spread evenly over the rest of the data set."""

GOOD_SHARE = 0.9
"""Smallest share of right known answers without a warning."""

_READING_S = 2.0
"""Time in seconds after which no more rows of a data set are read."""

_EXAMPLES = 3
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Truth:
    """The known answer of a row."""

    text: str
    file: str
    """File or data set that contains the row."""
    line: int
    """Line of the row in that file."""


@dataclass(frozen=True)
class TruthGrader:
    """Grade known answers as an environment does."""

    env_name: str
    verifier: str
    """Name of the verifier."""
    timeout_s: float
    """Deadline of one answer."""

    rewards: tuple[WeightedReward, ...] = ()
    """Rewards of answers about images, which decide in place of the verifier alone."""

    def grade(self, truths: Sequence[str]) -> dict[str, str]:
        """Grade each known answer as an answer to itself, and return the reason for each one that is not right."""
        each = list(dict.fromkeys(truths))
        answers = [(self.response(truth), truth) for truth in each]
        pool = GradingPool(self.verifier, 1, self.timeout_s)
        try:
            grades = grade_answers(self.rewards, answers, pool) if self.rewards else pool.grade_answers(answers)
        finally:
            pool.close()
        return {truth: reason for truth, grade in zip(each, grades, strict=True) if (reason := _reason(grade))}

    def response(self, truth: str) -> str:
        """Return a response with a known answer, in the form that the verifier reads."""
        if self.rewards:
            return known_response(self.rewards, truth)
        if self.verifier.endswith("multichoice"):
            return f"Answer: {truth}"
        return truth if "\\boxed" in truth else f"\\boxed{{{truth}}}"


def truth_grader(env_name: str, section: Mapping[str, Any] | BaseModel) -> TruthGrader | None:
    """Return the grader of an environment, or None if it compares no known answers, or is not of this library."""
    env_class, _ = load_env_class(env_class_path(env_name, section))
    if env_class is VLMEnvironment:
        vlm = VLMEnvironmentConfig.build(**own_keys(section_of(section), VLMEnvironmentConfig))
        rewards = tuple(weighted_rewards(vlm.reward_functions, f"env.{env_name}"))
        compares = any(weighted.name != "format" for weighted in rewards)
        return TruthGrader(env_name, "hf_math_verify", vlm.timeout_s, rewards) if compares else None
    if env_class not in (MathEnvironment, MathMultiRewardEnvironment):
        return None
    cfg = MathEnvironmentConfig.build(**own_keys(section_of(section), MathEnvironmentConfig))
    return TruthGrader(env_name, env_class.verifier_of(cfg), cfg.timeout_s)


def check_truths(
    data_sets: Sequence[RowsWithPlace], graders: Mapping[str, TruthGrader], task_env: Mapping[str, str] | None = None
) -> None:
    """Grade the known answers of each data set as answers to themselves, and warn if too few of them are right.

    Args:
        graders: graders by the name of the environment. Rows of other environments are not graded.
        task_env: environment by task name. A task that is left out has the name of its environment.

    Raises:
        DataError: no known answer of a data set is right.
    """
    if not graders:
        return
    for rows in {id(rows): rows for rows in data_sets}.values():
        by_env: dict[str, list[Truth]] = defaultdict(list)
        for task, truth in _sampled_truths(rows):
            by_env[(task_env or {}).get(task, task)].append(truth)
        for name, truths in by_env.items():
            if name in graders:
                _judge(graders[name], truths)


def _sampled_truths(rows: RowsWithPlace) -> Iterator[tuple[str, Truth]]:
    """Yield the task and the known answer of sampled rows, until reading them has taken too long."""
    deadline = time.monotonic() + _READING_S
    for idx in sampled_indices(len(rows)):
        datum: dict[str, Any] = dict(rows[idx])
        info = datum.get("extra_env_info") or {}
        if isinstance(info, Mapping) and info.get("ground_truth") is not None and not datum.get("fault"):
            yield str(datum.get("task_name")), Truth(str(info["ground_truth"]), *rows.place(idx))
        if time.monotonic() > deadline:
            return


def sampled_indices(num_rows: int) -> list[int]:
    """Return the indices of the first rows, and of further rows that are spread evenly over the rest."""
    first = min(num_rows, FIRST_ROWS)
    rest = num_rows - first
    spread = min(rest, SPREAD_ROWS)
    return [*range(first), *(first + (2 * number + 1) * rest // (2 * spread) for number in range(spread))]


def _judge(grader: TruthGrader, truths: Sequence[Truth]) -> None:
    """Raise an error if no known answer is right, and warn if too few are."""
    reasons = grader.grade([truth.text for truth in truths])
    wrong = [truth for truth in truths if truth.text in reasons]
    share = 1 - len(wrong) / len(truths)
    if share >= GOOD_SHARE:
        return
    examples = "".join(
        f"\n  {truth.file}:{truth.line}: {_shown(truth.text)}: {reasons[truth.text]}" for truth in wrong[:_EXAMPLES]
    )
    often = "never" if share == 0 else "rarely"
    found = (
        f"{truths[0].file}: {len(truths) - len(wrong)} of {len(truths)} known answers are right when the environment "
        f"{grader.env_name!r} (verifier {grader.verifier}) grades them as their own answers, so a model "
        f"{often} gets a reward for a right answer.{examples}\n{_advice(grader, wrong)}"
    )
    if share == 0:
        raise DataError(found)
    logger.warning("%s", found)


def _reason(grade: Grade) -> str:
    """Return why a known answer is not right, or an empty text if the answer is right."""
    if grade.verified is None:
        return str(grade.error)
    if grade.verified.is_correct:
        return ""
    answer = grade.verified.extracted_answer
    return "no answer is found in it" if answer is None else f"the answer read from it is {_shown(answer)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]}...{text[-_SHOWN_CHARS // 2 :]}")


def _advice(grader: TruthGrader, wrong: Sequence[Truth]) -> str:
    if any(SOLUTION_MARK in truth.text for truth in wrong):
        return (
            f"Solutions with {SOLUTION_MARK!r} before the final answer are in the form of GSM8K: set "
            "dataset_name: gsm8k (with the same data_path), or name a column with the final answer by output_key."
        )
    if grader.verifier.endswith("multichoice"):
        return (
            f"The verifier {grader.verifier} compares letters of choices: give the letter as the known answer, or set "
            f"env.{grader.env_name}.verifier_type=math."
        )
    return "Name the column with the final answer by output_key; it is a number, a formula, or a few words."
