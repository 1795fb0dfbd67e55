"""Load the rows of a configured data set by a built-in name, from files, or with a user's class.

Each kind of rows (conversations, pairs, labelled answers) has one table of names. Invariant: names are looked up and
rows are split in the same way for every kind.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.conversation_datasets import message_list
from nemo_rl.data.datasets.raw_dataset import FormattedRows, RawDataset, Row
from nemo_rl.data.datasets.rows.readers import RowTable
from nemo_rl.data.datasets.rows.values import value_of
from nemo_rl.utils.errors import DataError, did_you_mean
from nemo_rl.utils.imports import import_dotted

DatasetFactory = Callable[[DatasetConfig, str], RawDataset]
"""Function that makes a data set from its configuration and its role ("train" or "validation")."""


def own_messages(row: Row) -> list[dict[str, Any]]:
    """Return the conversation of a row of a user's class.

    Raises:
        RowError: The row has no conversation.
    """
    messages = value_of(row, "messages")
    if not isinstance(messages, list) or len(messages) < 2 or not all(isinstance(m, Mapping) for m in messages):
        raise RowError("'messages' is not a list of at least two messages")
    return message_list(messages, "messages", known_roles=None)


@dataclass(frozen=True)
class DatasetKind:
    """Data sets whose rows have the same form, with their names."""

    usual: str
    """Name of the data set that reads a `data_path` without a name."""
    named: Mapping[str, DatasetFactory]
    """Factories by name."""
    key: str = "messages"
    """Key of the content in a formatted row."""
    own_row: Callable[[Row], Any] = own_messages
    """Function that returns the content of a row of a user's class."""

    def load(self, config: DatasetConfig | Mapping[str, Any], role: str = TRAIN) -> RawDataset:
        """Load a configured data set, and split it if this is configured.

        Args:
            config: A data set of `data.train` or `data.validation`. A dict is checked and completed with defaults.
            role: "train" or "validation".

        Raises:
            DataError: The name is unknown, or the data cannot be read.
        """
        config = DatasetConfig.of(config)
        name = config.dataset_name or self.usual
        if config.dataset_name is None and config.data_path is None:
            raise DataError(f"data.{role} names no data: set dataset_name, or data_path to a file.")
        if name in self.named:
            raw = self.named[name](config, role)
        else:
            raw = ExternalDataset(self._own_class(name), config, role, self)
        raw.data_config = config
        raw.draw_rows(config.max_samples, config.seed)
        if role == TRAIN:
            raw.split_train_validation(config.split_validation_size, config.seed)
        return raw

    def _own_class(self, name: str) -> Callable[..., Any]:
        hint = did_you_mean(name, self.named, cutoff=0.5)
        known = f"Known: {', '.join(sorted(self.named))}; or the dotted path of a class."
        if "." not in name:
            raise DataError(f"dataset_name {name!r} is unknown.{hint} {known}")
        what = f"dataset_name {name!r} is unknown and"
        return import_dotted(name, DataError, what, f"{hint} {known}".strip())


class ExternalDataset(RawDataset):
    """Data of a user's class, which is named by its dotted path.

    The class is called with the configuration keys that are set (`data_path`, `split`, `seed` ...). An object must have
    `dataset`, a sequence of rows with `messages`. It may have validation rows in `val_dataset`, which are used if
    `data.train`, `data.validation` or both name the class.
    """

    def __init__(self, kind: Callable[..., Any], config: DatasetConfig, role: str, form: DatasetKind) -> None:
        self._form = form
        keys = {key: value for key, value in vars(config).items() if value is not None}
        _check_arguments(kind, keys, str(config.dataset_name))
        made = kind(**keys)
        rows = getattr(made, "dataset", None)
        if rows is None or not hasattr(rows, "__getitem__"):
            raise DataError(
                f"data set class {config.dataset_name!r} has no rows: its objects need an "
                "attribute `dataset` with [i] and len()."
            )
        held_out: Any = getattr(made, "val_dataset", None)
        self.brings_validation = held_out is not None
        if self.brings_validation and role == VALIDATION:
            rows, held_out = held_out, None
        self.dataset, self.bad_rows = self._checked(rows, config)
        self.num_rows = len(rows)
        if held_out is not None:
            self.val_dataset, bad = self._checked(held_out, config)
            self.bad_rows = self.bad_rows + bad
            self.num_rows += len(held_out)

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Split the rows, unless the class has already split them."""
        if not self.brings_validation:
            super().split_train_validation(test_size, seed)

    def _checked(self, rows: Any, config: DatasetConfig) -> tuple[FormattedRows, list[Any]]:
        table = RowTable(str(config.dataset_name), rows, range(len(rows)))
        checked = FormattedRows(table, [self._form.key], self._form.own_row, config.env_name, self._form.key)
        return checked, checked.bad_rows


def _check_arguments(kind: Callable[..., Any], keys: Mapping[str, Any], name: str) -> None:
    """Check that a user's class accepts its configured keys. Other errors of the class are not caught."""
    if not callable(kind):
        raise DataError(f"dataset_name {name!r} is a {type(kind).__name__}, not a class. Give the path of a class.")
    try:
        signature = inspect.signature(kind)
    except ValueError:  # raised for types written in C
        return
    try:
        signature.bind(**keys)
    except TypeError as reason:
        raise DataError(
            f"data set class {name!r} does not take the keys of its entry: {reason}. It is called with "
            f"{', '.join(sorted(keys))}; let it take those it reads, and **kwargs for the others."
        ) from None


def held_out_rows(raw: RawDataset, config: DatasetConfig, validation: Iterable[DatasetConfig]) -> Any:
    """Return the rows of a training data set that are used for validation, or None.

    The result is None if `data.validation` also names the class, because that data set provides the rows.
    """
    brings = isinstance(raw, ExternalDataset) and raw.brings_validation
    named = brings and any(entry.dataset_name == config.dataset_name for entry in validation)
    return None if named else raw.val_dataset
