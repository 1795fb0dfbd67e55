"""Load problems with known answers, and turn them into batches of prompts in a fixed order."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.config.base.names import ARITHMETIC, EPISODES, NEMO_GYM_ROWS
from nemo_rl.config.rules.evaluation import LOCALES, is_local_dataset
from nemo_rl.config.schema.algorithms.evaluation import EvalDataConfig
from nemo_rl.data.bad_rows import RowError, report_bad_rows
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.arithmetic import VALIDATION
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset, RowsWithPlace
from nemo_rl.data.datasets.raw_dataset import FormattedRow, FormattedRows, RawDataset, Row, RowView
from nemo_rl.data.datasets.response_datasets import (
    DATASET_REGISTRY,
    GSM8KDataset,
    ResponseDataset,
    load_response_dataset,
)
from nemo_rl.data.datasets.rows.control_tokens import check_control_tokens
from nemo_rl.data.datasets.rows.values import kind_of, text_of, value_of
from nemo_rl.data.datasets.user_data import checked_rows
from nemo_rl.data.interfaces import DatumSpec, TaskDataProcessFnCallable, TaskDataSpec, TokenizerType
from nemo_rl.data.messages.content import text_rules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.processors import get_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.grading.final_answer import last_boxed
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

MATH_PROCESSOR = "math_hf_data_processor"
CHOICE_PROCESSOR = "multichoice_qa_processor"
CHOICE_KEY = "choice"
_OWN_PROCESSORS = {EPISODES: "episode_data_processor", NEMO_GYM_ROWS: "nemo_gym_data_processor"}
"""Processors of data sets whose rows do not have a problem and an answer."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER = re.compile(r"\(?([A-Za-z])[).]?")


@dataclass(frozen=True)
class Problems:
    """A data set of problems."""

    raw: RawDataset
    """Rows with `messages`, or with `choice` for multiple choice."""
    processor_name: str = MATH_PROCESSOR
    """Name of the processor that turns a row into a prompt."""
    topic_key: str | None = None
    """Column by whose values results are also reported separately, or None for no topics."""
    task_spec: TaskDataSpec = field(default_factory=TaskDataSpec)
    """Texts that are added to a row, such as the system prompt."""

    @property
    def rows(self) -> Any:
        """The rows for an `AllTaskProcessedDataset`, with the parts of multiple-choice questions at their top level."""
        return [unfold_choice(row) for row in self.raw.dataset]

    @property
    def processor(self) -> TaskDataProcessFnCallable:
        """The function that turns a row into a prompt."""
        return get_processor(self.processor_name)


class MathDataset(ResponseDataset):
    r"""The data set MATH. The answer is the column `answer`, or else the last `\boxed{...}` of `solution`."""

    def columns(self) -> list[str]:
        """Return the names of the columns with the problem, the answer and the worked solution."""
        return [self.input_key, self.output_key, "solution"]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the problem and the final answer as messages."""
        if row.get(self.output_key) is not None:
            return super().to_messages(row)
        answer = last_boxed(text_of(row, "solution"))
        if not answer:
            raise RowError(f"neither {self.output_key!r} nor a \\boxed answer in 'solution'")
        return [
            {"role": "user", "content": text_of(row, self.input_key)},
            {"role": "assistant", "content": answer},
        ]


class ChoiceDataset(RawDataset):
    """Questions with lettered options. Each row has a `choice` with question, options, answer and subject.

    Options are a list in `options` or `choices`, or are in columns `A`, `B`, ...; the answer is a letter or
    the index of an option. Column names may start with a capital.
    """

    def __init__(self, config: DatasetConfig, source: HubSource) -> None:
        self.config = config
        table = load_table(config, VALIDATION, source)
        first = tuple(table.rows[0]) if len(table.rows) else ()
        rows = FormattedRows(table, first, self.to_choice, config.env_name, key=CHOICE_KEY)
        self.dataset = rows
        self.bad_rows = rows.bad_rows
        self.num_rows = table.num_rows
        self.first_columns = first

    def to_choice(self, row: Row) -> dict[str, Any]:
        """Convert a raw row to a question.

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """
        lower = {str(key).lower(): value for key, value in row.items()}
        options = _options(lower)
        return {
            "question": text_of(lower, (self.config.input_key or "question").lower()),
            "options": options,
            "answer": _letter(value_of(lower, (self.config.output_key or "answer").lower()), len(options)),
            "subject": lower.get("subject") or lower.get("category") or lower.get("type"),
        }


class GPQADataset(ChoiceDataset):
    """The data set GPQA, with one right and three wrong answers in a random order, which `data.seed` determines."""

    def to_choice(self, row: Row) -> dict[str, Any]:
        """Convert a raw row to a question with shuffled options."""
        question = text_of(row, self.config.input_key or "Question")
        right = text_of(row, self.config.output_key or "Correct Answer")
        answers = [right, *(text_of(row, f"Incorrect Answer {number}") for number in (1, 2, 3))]
        order = np.random.default_rng(derive_seed(self.config.seed, "gpqa", question)).permutation(len(answers))
        return {
            "question": question,
            "options": [answers[index] for index in order],
            "answer": _LETTERS[int(np.flatnonzero(order == 0)[0])],
            "subject": row.get("High-level domain"),
        }


def _options(row: Mapping[str, Any]) -> list[str]:
    listed = row.get("options", row.get("choices"))
    if listed is None:
        listed = [row[letter.lower()] for letter in _LETTERS if row.get(letter.lower()) is not None]
    if not isinstance(listed, list):
        raise RowError(f"the options are {kind_of(listed)}, not a list")
    if not listed:
        raise RowError("no options")
    return [text_of({"option": option}, "option") for option in listed]


def _letter(answer: Any, num_options: int) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool):
        index = answer
    else:
        found = _LETTER.fullmatch(str(answer).strip())
        index = _LETTERS.index(found.group(1).upper()) if found else -1
    if not 0 <= index < num_options:
        raise RowError("the answer is not a letter or index of an option")
    return _LETTERS[index]


Loader = Callable[[DatasetConfig], Problems]


def _math(source: HubSource, kind: type[ResponseDataset], topic: str | None = None) -> Loader:
    return lambda config: Problems(kind(config, VALIDATION, source), MATH_PROCESSOR, topic)


def _choice(source: HubSource, kind: type[ChoiceDataset] = ChoiceDataset) -> Loader:
    return lambda config: Problems(kind(config, source), CHOICE_PROCESSOR)


_MATH_SUBSETS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
_AIME_2025 = ("AIME2025-I", "AIME2025-II")
_SOURCE = partial(HubSource, section="data")
_TEST = partial(_SOURCE, split="test")

EVAL_REGISTRY: dict[str, Loader] = {
    "aime2024": _math(_SOURCE("HuggingFaceH4/aime_2024"), ResponseDataset),
    "aime2025": _math(_TEST("opencompass/AIME2025", "question", subsets=_AIME_2025), ResponseDataset),
    "gsm8k": _math(_TEST("openai/gsm8k", "question", subsets=("main",)), GSM8KDataset),
    "math": _math(_TEST("EleutherAI/hendrycks_math", subsets=_MATH_SUBSETS), MathDataset, "type"),
    "math500": _math(_TEST("HuggingFaceH4/MATH-500"), MathDataset, "subject"),
    "gpqa": _choice(_SOURCE("Idavidrein/gpqa", subsets=("gpqa_main",)), GPQADataset),
    "gpqa_diamond": _choice(_SOURCE("Idavidrein/gpqa", subsets=("gpqa_diamond",)), GPQADataset),
    "mmlu": _choice(_TEST("cais/mmlu", subsets=("all",))),
    "mmlu_pro": _choice(_TEST("TIGER-Lab/MMLU-Pro")),
    **{f"mmlu_{locale}": _choice(_TEST("openai/MMMLU", subsets=(locale.replace("-", "_"),))) for locale in LOCALES},
}


def load_eval_dataset(data_config: EvalDataConfig | Mapping[str, Any]) -> Problems:
    """Load the problems of a `data` section.

    Args:
        data_config: section `data` of an evaluation. A dict is checked and completed with defaults.

    Raises:
        ConfigError: A key is unknown or wrong.
        DataError: The name is unknown, or the data cannot be read.
    """
    config = EvalDataConfig.of(data_config)
    problems = _load(config)
    processor = config.processor or problems.processor_name
    return replace(
        problems,
        processor_name=processor,
        task_spec=TaskDataSpec(
            config.env_name,
            config.prompt_file,
            config.system_prompt_file,
            text_rules=text_rules(config),
            image_limits=config.images,
        ),
    )


def unfold_choice(row: FormattedRow) -> FormattedRow:
    """Copy the parts of a multiple-choice row to its top level, where the processor reads them."""
    return {**row[CHOICE_KEY], "task_name": row["task_name"]} if CHOICE_KEY in row else row


def _load(config: EvalDataConfig) -> Problems:
    entry = _as_dataset_config(config)
    name = entry.dataset_name
    if name in EVAL_REGISTRY:
        return EVAL_REGISTRY[name](entry)
    if name is None:
        return Problems(ResponseDataset(entry, VALIDATION, _SOURCE(None, "input", "output")))
    if name != ARITHMETIC and name not in DATASET_REGISTRY:
        raise DataError(f"data.dataset_name={name!r} is unknown. Known: {', '.join((*EVAL_REGISTRY, ARITHMETIC))}.")
    return Problems(load_response_dataset(entry, VALIDATION), _own_processor(config))


def _own_processor(config: EvalDataConfig) -> str:
    return _OWN_PROCESSORS.get(config.dataset_name or "", MATH_PROCESSOR)


def _as_dataset_config(config: EvalDataConfig) -> DatasetConfig:
    """Convert the section to the section of a training data set with the same meaning."""
    name, path = config.dataset_name, config.data_path
    if name is not None and is_local_dataset(name):
        name, path = None, name
    return DatasetConfig.build(
        dataset_name=name,
        data_path=path,
        subset=config.subset,
        split=config.split,
        input_key=config.problem_key,
        output_key=config.solution_key,
        seed=config.seed,
        env_name=config.env_name,
        processor=config.processor or _own_processor(config),
        num_samples=config.num_samples,
        min_operand=config.min_operand,
        max_operand=config.max_operand,
    )


logger = logging.getLogger(__name__)


class EvaluationPrompts(Protocol):
    """Prompts of an evaluation."""

    def __len__(self) -> int: ...

    def batch(self, start: int, stop: int) -> BatchedDataDict[Any]:
        """Return the prompts from index `start` to `stop - 1`, collated for a rollout."""

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """Data sets from which the prompts come, without duplicates."""

    def topic(self, index: int) -> str | None:
        """Return the topic of a prompt, or None if the data set has no topics."""


class GivenPrompts:
    """Prompts of a user-supplied data set.

    Args:
        dataset: as in `data.datasets.user_data.given_data`. Rows without `task_name` are graded by `data.env_name`.

    Raises:
        DataError: too many of the first rows are unusable.
    """

    def __init__(self, dataset: Any, config: EvalDataConfig) -> None:
        self._rows = checked_rows(dataset, config.max_bad_row_share, sampled=True, bad_rows=[])
        self._env_name = config.env_name

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, start: int, stop: int) -> BatchedDataDict[Any]:
        """Collate the prompts from `start` up to `stop`."""
        unnamed = {"task_name": self._env_name}
        data: list[Any] = [unnamed | dict(self._rows[index]) for index in range(start, stop)]
        return rl_collate_fn(data)

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """The data sets whose rows are evaluated."""
        return self._rows.parts

    def topic(self, index: int) -> str | None:
        """Return None, because the topics of given prompts are unknown."""
        return None


class EvalPrompts:
    """Prompts of an evaluation's `data` section.

    Args:
        stop_strings: texts that end an answer, in addition to those of `generation`.
        keeps_rows: whether the environment gets the columns of each row.

    Raises:
        DataError: the data cannot be read, too many rows are unusable, or prompt files and chat template do not fit.
    """

    def __init__(
        self,
        config: EvalDataConfig,
        tokenizer: TokenizerType,
        stop_strings: list[str] | None = None,
        *,
        keeps_rows: bool = False,
    ) -> None:
        if config.processor:
            get_processor(config.processor)
        problems = load_eval_dataset(config)
        spec = replace(problems.task_spec, stop_strings=stop_strings, keeps_rows=keeps_rows)
        raw = problems.raw
        name = config.data_path or str(config.dataset_name)
        self._topic_key = problems.topic_key
        control = control_tokens_of(tokenizer)
        rows, odd = check_control_tokens(name, _some(raw.dataset, config), control, config.control_tokens_in_rows)
        self._data = AllTaskProcessedDataset(
            rows,
            tokenizer,
            spec,
            problems.processor,
            unfold_choice,
            config.max_input_seq_length,
        )
        bad = raw.bad_rows + odd + self._data.leave_out_unusable(len(self._data), over_long=False)
        report_bad_rows(
            name,
            bad,
            raw.num_rows,
            config.max_bad_row_share,
            raw.first_columns,
            ("problem_key", "solution_key"),
        )
        self.num_bad_rows = len(bad)
        self._prompts = MixedDataset([self._data] * config.repeat)
        logger.info("Data: %d problems of %s.", len(self), name)

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, start: int, stop: int) -> BatchedDataDict[Any]:
        """Return the prompts from index `start` to `stop - 1`, collated for a rollout."""
        data: list[DatumSpec] = [self._prompts[index] for index in range(start, stop)]
        return rl_collate_fn(data)

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """The data set whose rows are evaluated."""
        return [self._data]

    def topic(self, index: int) -> str | None:
        """Return the topic of a prompt, or None if the data set has no topics."""
        row = unfold_choice(self._data.dataset[index % len(self._data)])
        topic = row.get(self._topic_key or "subject")
        return None if topic is None else str(topic)


def _some(rows: Sequence[FormattedRow], config: EvalDataConfig) -> Sequence[FormattedRow]:
    """Return all rows, or a random sample of `max_samples` rows in their original order, drawn with the seed."""
    if config.max_samples is None or config.max_samples >= len(rows):
        return rows
    rng = np.random.default_rng(derive_seed(config.seed, "eval_samples"))
    return RowView(rows, np.sort(rng.permutation(len(rows))[: config.max_samples]))
