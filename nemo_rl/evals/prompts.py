"""Turn the configuration's `data` into batches of prompts in a fixed order.

Invariant: prompt i is the same for every run of the same configuration, so an evaluation can continue an interrupted
one.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from nemo_rl.config.schema.algorithms.evaluation import EvalDataConfig
from nemo_rl.data.bad_rows import report_bad_rows
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset, RowsWithPlace
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RowView
from nemo_rl.data.datasets.rows.control_tokens import check_control_tokens
from nemo_rl.data.datasets.user_data import checked_rows
from nemo_rl.data.interfaces import DatumSpec, TokenizerType
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.processors import get_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.evals.datasets import load_eval_dataset, unfold_choice
from nemo_rl.utils.seed import derive_seed

logger = logging.getLogger(__name__)


class Prompts(Protocol):
    """Prompts of an evaluation."""

    def __len__(self) -> int: ...

    def batch(self, start: int, stop: int) -> BatchedDataDict[Any]:
        """Return prompts `start` to `stop - 1`, collated for a rollout."""

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """The data sets of the prompts, each once."""

    def topic(self, index: int) -> str | None:
        """Return the topic of a prompt; None if the data set has none."""


class GivenPrompts:
    """Prompts of a user-supplied data set.

    Args:
        dataset: see `data.datasets.user_data.given_data`; rows without `task_name` are graded by `data.env_name`.
        config: the `data` section.

    Raises:
        DataError: too many of its first rows are unusable.
    """

    def __init__(self, dataset: Any, config: EvalDataConfig) -> None:
        self._rows = checked_rows(dataset, config.max_bad_row_share, sampled=True, bad_rows=[])
        self._env_name = config.env_name

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, start: int, stop: int) -> BatchedDataDict[Any]:
        """See `Prompts`."""
        unnamed = {"task_name": self._env_name}
        data: list[Any] = [unnamed | dict(self._rows[index]) for index in range(start, stop)]
        return rl_collate_fn(data)

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """See `Prompts`."""
        return self._rows.parts

    def topic(self, index: int) -> str | None:
        """Return None: the topic is unknown."""
        return None


class EvalPrompts:
    """Prompts of an evaluation's `data` section.

    Args:
        config: the `data` section.
        tokenizer: renders and tokenises prompts.
        stop_strings: texts that end an answer, in addition to those of `generation`.

    Raises:
        DataError: the data cannot be read, too many of its rows are unusable, or prompt files and chat
            template do not fit together.
    """

    def __init__(self, config: EvalDataConfig, tokenizer: TokenizerType, stop_strings: list[str] | None = None) -> None:
        if config.processor:
            get_processor(config.processor)
        problems = load_eval_dataset(config)
        spec = replace(problems.task_spec, stop_strings=stop_strings)
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
        """Return prompts `start` to `stop - 1`, collated for a rollout."""
        data: list[DatumSpec] = [self._prompts[index] for index in range(start, stop)]
        return rl_collate_fn(data)

    @property
    def data_sets(self) -> list[RowsWithPlace]:
        """See `Prompts`."""
        return [self._data]

    def topic(self, index: int) -> str | None:
        """Return the topic of a prompt; None if the data set has none."""
        row = unfold_choice(self._data.dataset[index % len(self._data)])
        topic = row.get(self._topic_key or "subject")
        return None if topic is None else str(topic)


def _some(rows: Sequence[FormattedRow], config: EvalDataConfig) -> Sequence[FormattedRow]:
    """Return all rows, or a seeded random choice of `max_samples` rows in their original order."""
    if config.max_samples is None or config.max_samples >= len(rows):
        return rows
    rng = np.random.default_rng(derive_seed(config.seed, "eval_samples"))
    return RowView(rows, np.sort(rng.permutation(len(rows))[: config.max_samples]))
