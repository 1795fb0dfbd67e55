"""Load the prompts, conversations or pairs of the section `data`, for training and validation.

This runs before Ray starts. Invariant: every row is either usable or reported with its place. Errors that need no model
are raised here (unknown names, missing files, bad rows, prompt files and chat templates that do not fit). Only the
first rows of a data set are rendered now. Later unusable rows are reported when drawn, and not trained on.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.config import DataConfig, DatasetConfig, SupervisedDataConfig, report_findings
from nemo_rl.config.rules.data import check_environment
from nemo_rl.config.schema.env import keeps_rows, output_bytes_of, stop_strings_of
from nemo_rl.data.bad_rows import BadRow, report_bad_rows
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.preference_datasets import load_feedback_dataset, load_preference_dataset
from nemo_rl.data.datasets.processed_dataset import TOO_LONG, AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RawDataset, RowView, row_place
from nemo_rl.data.datasets.registry import held_out_rows
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.rows.control_tokens import check_control_tokens
from nemo_rl.data.datasets.rows.labelled_steps import load_labelled_steps
from nemo_rl.data.datasets.rows.scored_answers import ScoreColumns, load_scored_dataset
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.messages.content import text_rules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.conversations import (
    feedback_processor,
    preference_preprocessor,
    scored_answer_processor,
    sft_processor,
)
from nemo_rl.data.messages.steps import labelled_steps_processor
from nemo_rl.data.processors import columns_of, get_processor, vlm_hf_data_processor
from nemo_rl.utils.errors import DataError


def leave_out_long_outputs(
    rows: Sequence[FormattedRow], output_bytes: int | None
) -> tuple[Sequence[FormattedRow], list[BadRow]]:
    """Leave out rows whose tests expect more output than the environment allows a program to write.

    Args:
        rows: Formatted rows, whose last message has the tests as JSON.
        output_bytes: Largest number of bytes of output, or None if the environment runs no programs.

    Returns:
        The rows to use, and the rows left out.
    """
    if output_bytes is None:
        return rows, []
    kept, bad = [], []
    for position in range(len(rows)):
        longest = _longest_output(rows[position], output_bytes)
        if longest <= output_bytes:
            kept.append(position)
            continue
        reason = f"the tests expect an output of {longest} bytes, more than env.code.output_bytes={output_bytes}"
        bad.append(BadRow(*row_place(rows, position), reason))
    return (RowView(rows, np.array(kept, dtype=np.int64)), bad) if bad else (rows, [])


def _longest_output(row: FormattedRow, limit: int) -> int:
    """Return the bytes of the longest expected output, or 0 if the row is too short to exceed the limit."""
    text = row["messages"][-1]["content"]
    if not isinstance(text, str) or len(text) <= limit // 2:  # JSON escapes are longer than their bytes
        return 0
    try:
        tests = json.loads(text)
        outputs = tests.get("outputs") or ()
        return max((len(one.rstrip().encode(errors="surrogatepass")) for one in outputs), default=0)
    except (AttributeError, TypeError, ValueError):  # the answer does not contain tests
        return 0


logger = logging.getLogger(__name__)

TRIED_ROWS = 100
"""Number of prompts of each data set that are rendered at the start."""

CHECKED_ROWS = 2000
"""Number of conversations of each data set that are rendered at the start. Too long ones are not used for training."""

_KEPT_SHARE = 0.9

type Loader = Callable[[DatasetConfig, str], RawDataset]
type Processor = Callable[..., Any]


@dataclass(frozen=True)
class RunData:
    """Training and validation rows of a run. The functions of this file return them."""

    train: MixedDataset
    """Training rows. Rows of named data sets have these names."""
    validation: MixedDataset | None
    """Validation rows of data sets without a name, or None."""
    bad_rows: list[BadRow]
    """Rows that were left out of any of the data sets, with their places."""
    named_validation: Mapping[str, MixedDataset] = field(default_factory=dict)
    """Validation rows by the name of their data set."""
    task_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of each task, by task name. Both names are the same at present."""

    @property
    def all_validation(self) -> MixedDataset | None:
        """Return all validation rows, including `named_validation` with its names, or None without validation rows."""
        parts = [] if self.validation is None else list(zip(self.validation.parts, self.validation.names, strict=True))
        parts += [(part, name) for name, rows in self.named_validation.items() for part in rows.parts]
        return MixedDataset([part for part, _ in parts], [name for _, name in parts]) if parts else None


def setup_response_data(
    tokenizer: TokenizerType,
    data_config: DataConfig,
    environments: Mapping[str, Any] | Collection[str] | None = None,
    tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> RunData:
    """Load, check and combine all data sets of prompts.

    Validation rows are those reserved from training data (`split_validation_size`), followed by those of
    `data.validation`.

    Args:
        environments: Section `env` or its names, or None if answers are not graded.
        tools: Function schemas that prompts offer, by the name of the environment.

    Raises:
        ConfigError, DataError: See the module docstring.
    """
    sections = environments if isinstance(environments, Mapping) else {}
    for entry, role in _entries(data_config):
        if environments is not None:
            report_findings(check_environment(f"data.{role}", entry.env_name, environments))
    parts = [
        _Part(
            load_response_dataset,
            get_processor(entry.processor),
            TRIED_ROWS,
            over_long=False,
            stop_strings=stop_strings_of(sections, entry.env_name),
            tools=(tools or {}).get(entry.env_name or "", ()),
            output_bytes=output_bytes_of(sections, entry.env_name),
            keeps_rows=keeps_rows(sections, entry.env_name),
        )
        for entry, _ in _entries(data_config)
    ]
    return _setup(tokenizer, data_config, parts)


def setup_sft_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> RunData:
    """Load, check and combine all data sets of conversations. Errors are those of `setup_response_data`."""
    return _setup_supervised(tokenizer, data_config, load_response_dataset, sft_processor)


def setup_preference_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> RunData:
    """Load, check and combine all data sets of pairs, as `setup_sft_data` does."""
    return _setup_supervised(tokenizer, data_config, load_preference_dataset, preference_preprocessor)


def setup_feedback_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> RunData:
    """Load, check and combine all data sets of labelled answers and pairs, as `setup_sft_data` does."""
    return _setup_supervised(tokenizer, data_config, load_feedback_dataset, feedback_processor)


def setup_scored_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig, scores: ScoreColumns) -> RunData:
    """Load, check and combine all data sets of answers with scores, as `setup_sft_data` does."""
    load = partial(load_scored_dataset, scores=scores)
    return _setup_supervised(tokenizer, data_config, load, scored_answer_processor)


def setup_step_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig, separator: str) -> RunData:
    """Load, check and combine all data sets of answers with labelled steps, as `setup_sft_data` does.

    Args:
        separator: Text after each step.
    """
    usual = partial(labelled_steps_processor, separator=separator)
    parts = []
    for entry, _ in _entries(data_config):
        process: Processor = get_processor(entry.processor)
        process = usual if process in (sft_processor, vlm_hf_data_processor) else process
        parts.append(_Part(load_labelled_steps, process, CHECKED_ROWS, over_long=True))
    return _setup(tokenizer, data_config, parts)


@dataclass(frozen=True)
class _Part:
    """Functions and limits by which a configured data set becomes rows of tokens."""

    load: Loader
    """Function that reads the rows."""
    process: Processor
    """Function that converts a row to tokens."""
    num_tried: int
    """Number of rows that are rendered at the start."""
    over_long: bool
    """Whether a row that is too long is a bad row."""
    stop_strings: list[str] | None = None
    """Stop strings of answers to the prompts."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas that the prompts offer."""
    output_bytes: int | None = None
    """Largest number of bytes that a program may write. None if the environment runs no programs."""
    keeps_rows: bool = False
    """Whether the environment gets the columns of each row."""


def _setup_supervised(
    tokenizer: TokenizerType, data_config: SupervisedDataConfig, load: Loader, usual: Processor
) -> RunData:
    """Set up supervised data. The names `sft_processor` and `vlm_hf_data_processor` select the processor `usual`."""
    parts = []
    for entry, _ in _entries(data_config):
        process: Processor = get_processor(entry.processor)
        if process in (sft_processor, vlm_hf_data_processor):
            process = partial(
                usual,
                add_bos=data_config.add_bos,
                add_eos=data_config.add_eos,
                add_generation_prompt=data_config.add_generation_prompt,
            )
        parts.append(_Part(load, process, CHECKED_ROWS, over_long=True))
    return _setup(tokenizer, data_config, parts)


def _entries(data_config: DataConfig) -> list[tuple[DatasetConfig, str]]:
    if not data_config.train_entries:
        raise DataError("data.train is empty: give it a dataset_name or a data_path.")
    train = [(entry, TRAIN) for entry in data_config.train_entries]
    return train + [(entry, VALIDATION) for entry in data_config.validation_entries]


def _setup(tokenizer: TokenizerType, data_config: DataConfig, parts: list[_Part]) -> RunData:
    train: list[MixedDataset] = []
    validation: dict[str | None, list[MixedDataset]] = {}
    bad_rows: list[BadRow] = []
    entries, rules = _entries(data_config), text_rules(data_config)
    control = control_tokens_of(tokenizer)
    specs = [
        TaskDataSpec(
            entry.env_name,
            entry.prompt_file,
            entry.system_prompt_file,
            part.stop_strings,
            rules,
            part.tools,
            data_config.template_may_leave_out,
            part.keeps_rows,
            data_config.images,
        )
        for (entry, _), part in zip(entries, parts, strict=True)
    ]
    for (entry, role), part, spec in zip(entries, parts, specs, strict=True):
        raw = part.load(entry, role)
        held_out = held_out_rows(raw, entry, data_config.validation_entries)
        bad, name = raw.bad_rows, entry.data_path or str(entry.dataset_name)
        for rows, use, times in ((raw.dataset, role, entry.repeat), (held_out, VALIDATION, 1)):
            if rows is None:
                continue
            kept, odd = check_control_tokens(name, rows, control, data_config.control_tokens_in_rows)
            kept, long = leave_out_long_outputs(kept, part.output_bytes)
            bad = bad + odd + long
            made = AllTaskProcessedDataset(
                kept, tokenizer, spec, part.process, max_seq_length=data_config.max_input_seq_length
            )
            bad = bad + made.leave_out_unusable(part.num_tried, over_long=part.over_long)
            parts_of_use = train if use == TRAIN else validation.setdefault(entry.name, [])
            parts_of_use.append(MixedDataset([made] * times))
        bad = list(dict.fromkeys(bad))
        advice = partial(_length_advice, bad, raw.dataset, tokenizer, spec, part)
        report_bad_rows(name, bad, raw.num_rows, data_config.max_bad_row_share, raw.first_columns, advice=advice)
        _report_unused_columns(name, raw, part)
        bad_rows += bad
    sets = {name: MixedDataset(rows) for name, rows in validation.items()}
    env_names = sorted({entry.env_name for entry, _ in entries if entry.env_name})
    data = RunData(
        train=MixedDataset(train, data_config.train_names),
        validation=sets.pop(None, None),
        bad_rows=bad_rows,
        named_validation={str(name): rows for name, rows in sets.items()},
        task_env={name: name for name in env_names},
    )
    num_validation = sum(len(rows) for group in validation.values() for rows in group)
    logger.info("Data: %d training and %d validation rows.", len(data.train), num_validation)
    return data


def _length_advice(bad: Sequence[BadRow], rows: Any, tokenizer: TokenizerType, spec: TaskDataSpec, part: _Part) -> str:
    """Return advice on the length limit if rows are too long: the key, and the length that keeps 90 % of rows."""
    if not any(row.reason.startswith(TOO_LONG) for row in bad):
        return ""
    unlimited = AllTaskProcessedDataset(rows, tokenizer, spec, part.process)
    length = unlimited.length_that_keeps(_KEPT_SHARE, part.num_tried)
    return (
        "The length is data.max_input_seq_length, which is policy.max_total_sequence_length unless it is set; "
        f"{length} tokens keep {_KEPT_SHARE:.0%} of the rows. "
    )


def _report_unused_columns(name: str, raw: RawDataset, part: _Part) -> None:
    """Log the columns that neither the data set nor a built-in processor reads."""
    read = columns_of(part.process)
    unused = [] if read is None or part.keeps_rows else [column for column in raw.unused_columns if column not in read]
    if unused:
        logger.info("Data set %s: nothing reads its columns %s.", name, ", ".join(unused))
