"""Merge data sets and complete configurations of data sets, under NeMo RL's names."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch.utils.data import ConcatDataset

from nemo_rl.data.datasets.rows.readers import is_table
from nemo_rl.utils.errors import DataError


def merge_datasets(datasets_: list[Any]) -> Any:
    """Concatenate several data sets.

    Args:
        datasets_: Hugging Face data sets, or anything with `len()` and `[i]`.

    Returns:
        A Hugging Face data set if all are such, or else an object with `len()` and `[i]`. A single one is unchanged.

    Raises:
        DataError: No data set is given, or the column types of Hugging Face data sets differ.
    """
    if not datasets_:
        raise DataError("merge_datasets needs at least one data set, got none.")
    if len(datasets_) == 1:
        return datasets_[0]
    if not all(is_table(rows) for rows in datasets_):
        return ConcatDataset(datasets_)
    import datasets

    try:
        return datasets.concatenate_datasets(datasets_)
    except ValueError as error:
        raise DataError(f"the data sets cannot be merged: {error}") from error


def update_single_dataset_config(
    data_config: MutableMapping[str, Any], default_data_config: Mapping[str, Any] | None
) -> None:
    """Complete a data set of `data.train` or `data.validation` with values from `data.default`, in place."""
    for key, value in (default_data_config or {}).items():
        if key not in data_config:
            data_config[key] = value
