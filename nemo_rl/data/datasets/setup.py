"""From `data` of the config to the training and validation data sets.

Runs before Ray starts. Invariant: every problem that can be seen without a model (unknown names, missing files, bad
rows, prompt files and chat templates that do not fit) is an error here, not in the first step.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from nemo_rl.config import DataConfig, DatasetConfig
from nemo_rl.data.bad_rows import BadRow, report_bad_rows
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.raw_dataset import FormattedRow
from nemo_rl.data.datasets.response_datasets import held_out_rows, load_response_dataset
from nemo_rl.data.interfaces import TaskDataProcessFnCallable, TaskDataSpec, TokenizerType
from nemo_rl.data.processors import get_processor
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

TRIED_ROWS = 100
"""Rows of each data set that are rendered at the start; later ones are reported when they are drawn."""


@dataclass(frozen=True)
class ResponseData:
    """What `setup_response_data` returns.

    Attributes:
        train: Training prompts.
        validation: Validation prompts, or None.
        task_env: Environment by task name; today a task is named after its environment.
        bad_rows: Rows left out of any of the data sets, with their places.
    """

    train: MixedDataset
    validation: MixedDataset | None
    task_env: dict[str, str]
    bad_rows: list[BadRow]


def setup_response_data(
    tokenizer: TokenizerType,
    data_config: DataConfig,
    env_names: Collection[str] | None = None,
) -> ResponseData:
    """Load, check and combine all data sets of the config.

    Validation is the rows set aside from training data (`split_validation_size`) followed by the
    entries of `data.validation`.

    Args:
        tokenizer: Renders and tokenises prompts.
        data_config: `data` of the config.
        env_names: Environments that exist (`env` of the config). None when answers are not graded.

    Raises:
        DataError: Any of the problems named at the top of this file.
    """
    train_entries = data_config.train_entries
    if not train_entries:
        raise DataError("data.train is empty: give it a dataset_name or a data_path.")
    validation_entries = data_config.validation_entries
    plans = [_Plan(entry, TRAIN, tokenizer, data_config, env_names) for entry in train_entries]
    checks = [_Plan(entry, VALIDATION, tokenizer, data_config, env_names) for entry in validation_entries]
    train: list[AllTaskProcessedDataset] = []
    validation: list[AllTaskProcessedDataset] = []
    bad_rows: list[BadRow] = []
    for plan in plans + checks:
        loaded = plan.load()
        bad_rows += loaded.bad_rows
        (train if plan.role == TRAIN else validation).append(loaded.rows)
        if loaded.held_out is not None:
            validation.append(loaded.held_out)
    names = sorted({plan.config.env_name for plan in plans + checks if plan.config.env_name})
    data = ResponseData(
        train=MixedDataset(train),
        validation=MixedDataset(validation) if validation else None,
        task_env={name: name for name in names},
        bad_rows=bad_rows,
    )
    num_validation = len(data.validation) if data.validation else 0
    logger.info("Data: %d training and %d validation rows.", len(data.train), num_validation)
    return data


@dataclass(frozen=True)
class _Loaded:
    rows: AllTaskProcessedDataset
    held_out: AllTaskProcessedDataset | None
    bad_rows: list[BadRow]


class _Plan:
    """One entry of the config; cheap mistakes are found when it is made, before any row is read."""

    def __init__(
        self,
        config: DatasetConfig,
        role: str,
        tokenizer: TokenizerType,
        data_config: DataConfig,
        env_names: Collection[str] | None,
    ) -> None:
        self.config = config
        self.role = role
        self.tokenizer = tokenizer
        self.max_seq_length = data_config.max_input_seq_length
        self.max_bad_row_share = data_config.max_bad_row_share
        self.validation_entries = data_config.validation_entries
        _check_env(config, role, env_names)
        self.processor: TaskDataProcessFnCallable = get_processor(config.processor)
        self.spec = TaskDataSpec(config.env_name, config.prompt_file, config.system_prompt_file)

    def load(self) -> _Loaded:
        """Read the rows, try the first ones, and refuse them if too many are bad."""
        raw = load_response_dataset(self.config, self.role)
        name = self.config.data_path or str(self.config.dataset_name)
        rows = self._process(raw.dataset)
        validating = held_out_rows(raw, self.config, self.validation_entries)
        held_out = None if validating is None else self._process(validating)
        bad = list(raw.bad_rows)
        for part in (rows, held_out):
            bad += [] if part is None else part.leave_out_unusable(TRIED_ROWS, over_long=False)
        bad = list(dict.fromkeys(bad))
        report_bad_rows(name, bad, raw.num_rows, self.max_bad_row_share, raw.first_columns)
        return _Loaded(rows, held_out, bad)

    def _process(self, rows: Sequence[FormattedRow]) -> AllTaskProcessedDataset:
        return AllTaskProcessedDataset(
            rows, self.tokenizer, self.spec, self.processor, max_seq_length=self.max_seq_length
        )


def _check_env(config: DatasetConfig, role: str, env_names: Collection[str] | None) -> None:
    if env_names is None or config.env_name in env_names:
        return
    near = get_close_matches(str(config.env_name), env_names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"data.{role}.env_name={config.env_name!r} is not configured under env; there are: "
        f"{', '.join(sorted(env_names)) or 'none'}.{hint}"
    )
