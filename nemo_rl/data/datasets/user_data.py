"""Prepare data sets that a program passes instead of the configured ones.

Invariant: they pass the same early checks as configured ones, so that unusable data is found before Ray starts.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from nemo_rl.config import DataConfig
from nemo_rl.data.bad_rows import BadRow, report_bad_rows
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.setup import CHECKED_ROWS, TRIED_ROWS, RunData
from nemo_rl.utils.errors import DataError

UNNAMED = "default"
"""Name of the validation rows that are reported as `validation/`, if a program passes data sets by name."""


class GivenRows(Dataset[Any]):
    """Data of a program's class, as a part of a `MixedDataset`.

    Args:
        rows: Data with `len()` and `[i]`. Each item is a datum, as a processor returns it.

    Raises:
        DataError: The data has no length or no index.
    """

    def __init__(self, rows: Any) -> None:
        if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
            raise DataError(
                f"a data set of type {type(rows).__name__} has no len() and [i]. Use an AllTaskProcessedDataset, or "
                "any object with both; an IterableDataset cannot be resumed."
            )
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int) -> Any:
        return dict(self.rows[idx])

    def place(self, idx: int) -> tuple[str, int]:
        """Return the type of the data set and the index of a row."""
        return type(self.rows).__name__, idx


def given_data(dataset: Any, val_dataset: Any, config: DataConfig, *, sampled: bool) -> RunData:
    """Make the data of a run from the data sets that a program passes.

    Args:
        dataset: Training rows: an `AllTaskProcessedDataset`, data of another run, or anything with `len()` and `[i]`.
        val_dataset: Validation rows of the same kinds, a mapping from names to them, or None for no validation.
        config: Section `data` of the configuration. Its keys `train` and `validation` are ignored.
        sampled: Whether rows are prompts, which name their environment as `task_name`, or are trained on directly.

    Raises:
        DataError: A data set is of another kind, or too many of its first rows cannot be used or name no task.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            "training data by name needs one data loader for each set, which is not built yet; pass one data set."
        )
    bad_rows: list[BadRow] = []
    share = config.max_bad_row_share
    by_name = dict(val_dataset) if isinstance(val_dataset, Mapping) else {UNNAMED: val_dataset}
    train = checked_rows(dataset, share, sampled, bad_rows)
    sets = {name: checked_rows(rows, share, sampled, bad_rows) for name, rows in by_name.items() if rows is not None}
    tasks = set().union(*(_tasks(rows) for rows in (train, *sets.values()))) if sampled else set()
    return RunData(train, sets.pop(UNNAMED, None), bad_rows, sets, {name: name for name in sorted(tasks)})


def checked_rows(dataset: Any, max_bad_row_share: float, sampled: bool, bad_rows: list[BadRow]) -> MixedDataset:
    """Check the first rows of a program's data set, and return the data set. Errors are those of `given_data`.

    Args:
        max_bad_row_share: Value of `data.max_bad_row_share`.
        sampled: Whether rows are prompts.
        bad_rows: List to which rows that are left out are appended.
    """
    if isinstance(dataset, MixedDataset):
        return dataset
    if not isinstance(dataset, AllTaskProcessedDataset):
        return MixedDataset([GivenRows(dataset)])
    own, total = copy.copy(dataset), len(dataset)
    bad = own.leave_out_unusable(TRIED_ROWS if sampled else CHECKED_ROWS, over_long=not sampled)
    report_bad_rows(type(dataset.dataset).__name__, bad, total, max_bad_row_share)
    bad_rows += bad
    return MixedDataset([own])


def _tasks(rows: MixedDataset) -> set[str]:
    """Return the names of the tasks of the first rows."""
    tasks = {rows[idx].get("task_name") for idx in range(min(TRIED_ROWS, len(rows)))}
    if None in tasks:
        raise DataError(
            "a row of the data set has no task_name, which names the environment that rewards it. Let the "
            "processor set it."
        )
    return {str(task) for task in tasks}
