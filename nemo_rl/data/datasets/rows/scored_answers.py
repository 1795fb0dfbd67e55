"""Read data sets of answers with numeric scores, such as those of HelpSteer2 from 0 to 4, and generate one.

Invariant: a score of a usable row is a finite number within the limits of the run, or it is missing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.config.base.names import ARITHMETIC_SCORES
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import OFFSETS, TRAIN, WorkedSumsDataset, steps_of, with_wrong_result, write_out
from nemo_rl.data.datasets.conversation_datasets import ASSISTANT
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.preference_datasets import (
    after_prompt,
    answer_messages,
    prompt_messages,
    whole_conversation,
    with_tools,
)
from nemo_rl.data.datasets.raw_dataset import FormattedRow, FormattedRows, RawDataset, Row
from nemo_rl.data.datasets.registry import DatasetKind
from nemo_rl.data.datasets.rows.values import kind_of, value_of
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

KEY = "scored"
"""Key of the content in a formatted row."""
_SCORES = "scores"


@dataclass(frozen=True)
class ScoreColumns:
    """The scores that a reward model learns."""

    names: tuple[str, ...]
    """Names of the attributes."""
    lowest: float | None = None
    """Smallest score. None if there is no limit."""
    highest: float | None = None
    """Largest score. None if there is no limit."""

    def of(self, row: Row, key: str | None = None) -> list[float | None]:
        """Return the score of each attribute of a row, None for a missing one.

        Args:
            key: Column with a mapping from attributes to scores. If None, the column `scores` if it is a mapping,
                otherwise a column for each attribute.

        Raises:
            RowError: A score is no number or out of range, or all scores are missing.
        """
        place, values = key or _SCORES, row if key is None else value_of(row, key)
        if key is None and isinstance(row.get(_SCORES), Mapping):
            values = row[_SCORES]
        if not isinstance(values, Mapping):
            raise RowError(f"{place!r} is {kind_of(values)}, not an object with scores")
        prefix = "" if values is row else f"{place}."
        scores = [self._score(values.get(name), f"{prefix}{name}") for name in self.names]
        if all(score is None for score in scores):
            raise RowError(f"it has none of the scores {', '.join(f'{prefix}{name}' for name in self.names)}")
        return scores

    def _score(self, value: Any, name: str) -> float | None:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowError(f"{name!r} is {kind_of(value)}, not a number")
        low = -math.inf if self.lowest is None else self.lowest
        high = math.inf if self.highest is None else self.highest
        if not math.isfinite(value) or not low <= value <= high:
            limits = "a finite number" if (low, high) == (-math.inf, math.inf) else f"a number from {low:g} to {high:g}"
            raise RowError(f"{name!r} is {value:g}, not {limits} (rm.min_score, rm.max_score)")
        return float(value)


class ScoredAnswersDataset(RawDataset):
    """Rows with a prompt (`prompt_key`), an answer (`output_key`, by default `response`), and scores of the answer.

    Prompt and answer are texts or lists of messages. Without a prompt column, `chat_key` (by default `messages`) is a
    whole conversation that ends with the answer. Scores are columns, or the mapping in `scores_key`.

    Args:
        config: A data set of `data.train` or `data.validation`.
        role: "train" or "validation", which determines the default split.
        scores: The scores to read.
        source: Location of a named data set, or None for any file or hub id.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(
        self, config: DatasetConfig, role: str = TRAIN, *, scores: ScoreColumns, source: HubSource | None = None
    ) -> None:
        table = load_table(config, role, source or HubSource(None))
        self._config, self._scores = config, scores
        self._prompt_key, self._answer_key = config.prompt_key or "prompt", config.output_key or "response"
        self._chat_key, self._tool_key = config.chat_key or "messages", config.tool_key or "tools"
        own = [config.scores_key] if config.scores_key else [_SCORES, *scores.names]
        columns = [self._prompt_key, self._answer_key, self._chat_key, self._tool_key, *own]
        self.take_rows(table, FormattedRows(table, columns, self._scored, config.env_name, key=KEY))

    def _scored(self, row: Row) -> dict[str, Any]:
        scores = self._scores.of(row, self._config.scores_key)
        if self._config.prompt_key is not None or self._prompt_key in row:
            context = prompt_messages(value_of(row, self._prompt_key), self._prompt_key)
            completion = answer_messages(row, self._answer_key)
            if completion[0]["role"] != ASSISTANT:
                end = after_prompt(context, completion)
                context, completion = completion[:end], completion[end:]
        else:
            messages = whole_conversation(value_of(row, self._chat_key), self._chat_key)
            context, completion = messages[:-1], messages[-1:]
            if not context:
                raise RowError(f"{self._chat_key!r} has no prompt")
        return with_tools({"context": context, "completion": completion, "scores": scores}, row, self._tool_key)


_SUM_SCORES = ("correctness", "completeness")
_BEST = 4.0


class ScoredSumsDataset(WorkedSumsDataset):
    """Worked answers of sums with the scores correctness and completeness, both from 0 to 4.

    Half of the answers have a wrong result, and an answer has only some last steps. Completeness is the share of the
    steps that are written, and correctness the share of the written steps that are right, times 4.

    Args:
        config: As in `WorkedSumsDataset`.
        role: "train" or "validation".
        scores: The scores to learn.

    Raises:
        DataError: The answers have no such score.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN, *, scores: ScoreColumns) -> None:
        unknown = [name for name in scores.names if name not in _SUM_SCORES]
        if unknown:
            raise DataError(
                f"{ARITHMETIC_SCORES} has no score {', '.join(unknown)}. Set policy.reward_model_cfg.attributes to "
                f"some of {', '.join(_SUM_SCORES)}."
            )
        self._scores = scores
        super().__init__(config, role)

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return ScoredRows(sums, derive_seed(self._config.seed, ARITHMETIC_SCORES, split), self._scores)


class ScoredRows(Sequence[FormattedRow]):
    """Rows with a worked answer of a sum and its scores.

    Args:
        sums: The sums.
        seed: Seed of the errors and of the numbers of steps.
        scores: The scores of each row.
    """

    def __init__(self, sums: Sequence[FormattedRow], seed: int, scores: ScoreColumns) -> None:
        self._sums, self._scores = sums, scores
        rng = np.random.default_rng(seed)
        self._is_wrong = rng.random(len(sums)) < 0.5
        self._wrong_step, self._first_step = rng.random(len(sums)), rng.random(len(sums))
        self._offset = rng.choice(OFFSETS, len(sums))

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, position: Any) -> Any:
        row = self._sums[position]
        steps = steps_of(row["problem"])
        first = int(self._first_step[position] * len(steps))
        shown = steps[first:]
        if self._is_wrong[position]:
            number = int(self._wrong_step[position] * len(shown))
            shown = with_wrong_result(shown, number, int(self._offset[position]))
        right = sum(a + b == c for a, b, c in shown) / len(shown)
        values = {"correctness": _BEST * right, "completeness": _BEST * len(shown) / len(steps)}
        answer = {"role": ASSISTANT, "content": write_out(shown)}
        scored = {"context": [row["messages"][0]], "completion": [answer], "scores": self._scores.of(values)}
        return {KEY: scored, "task_name": row["task_name"]}


_FACTORIES: dict[str, Callable[..., RawDataset]] = {
    "HelpSteer2": partial(ScoredAnswersDataset, source=HubSource("nvidia/HelpSteer2", validation_split="validation")),
    "ScoredAnswersDataset": ScoredAnswersDataset,
    ARITHMETIC_SCORES: ScoredSumsDataset,
}


def load_scored_dataset(config: DatasetConfig, role: str = TRAIN, *, scores: ScoreColumns) -> RawDataset:
    """Load a configured data set of scored answers (`DatasetKind.load`).

    Args:
        scores: The scores to read.
    """
    named = {name: partial(factory, scores=scores) for name, factory in _FACTORIES.items()}

    def own_row(row: Row) -> dict[str, Any]:
        messages = whole_conversation(value_of(row, "messages"), "messages")
        return {"context": messages[:-1], "completion": messages[-1:], "scores": scores.of(row, config.scores_key)}

    return DatasetKind("ScoredAnswersDataset", named, KEY, own_row).load(config, role)
