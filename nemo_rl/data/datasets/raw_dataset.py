"""Hold the formatted rows of one data set before tokenisation.

Invariant: a formatted row has `messages` (the last message is the answer) and `task_name`. Rows are checked when the
object is constructed, and formatted when they are read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import BadRow, RowError
from nemo_rl.data.datasets.rows.images import IMAGES, UndecodedRows, folder_of, undecoded, with_images
from nemo_rl.data.datasets.rows.readers import NOT_UTF8, Row, RowTable, is_table
from nemo_rl.data.interfaces import TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.processors import get_processor
from nemo_rl.utils.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow


class ArrowNulls:
    """Remove the nulls that Arrow has added to the rows of a table.

    A null stays if its field is null in every row, because then the file itself contains it (`"default": null`).
    """

    def __init__(self, rows: "datasets.Dataset") -> None:
        import pyarrow

        self._nested: dict[str, pyarrow.DataType] = {
            field.name: field.type for field in rows.data.schema if pyarrow.types.is_nested(field.type)
        }

    def removed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row without added nulls. Columns without structs or lists are not changed."""
        if not self._nested:
            return row
        return {key: _without(value, self._nested[key]) if key in self._nested else value for key, value in row.items()}


def _without(value: Any, kind: "pyarrow.DataType") -> Any:
    from pyarrow import types

    if isinstance(value, dict) and types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {
            key: _without(below, fields[key]) if key in fields else below
            for key, below in value.items()
            if below is not None or key not in fields or types.is_null(fields[key])
        }
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if isinstance(value, list) and is_list:
        return [_without(below, kind.value_type) for below in value]
    return value


FormattedRow = dict[str, Any]

_SCAN_ROWS = 1000
IGNORED_COLUMNS = frozenset(("id", "idx", "index", "uuid", "source", "dataset"))
"""Columns that describe the origin of a row. They are ignored without a report."""
_ODD_VALUE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that Python raises for values that are not checked before."""


class RawDataset:
    """A data set, which may be split into training and validation rows.

    A user's own class needs `dataset`, a sequence of formatted rows, and may have `val_dataset`,
    `bad_rows` and `num_rows`.
    """

    dataset: Sequence[FormattedRow]
    """Rows to train (or validate) on."""
    val_dataset: Sequence[FormattedRow] | None = None
    """Rows that `split_train_validation` reserved for validation, or None."""
    bad_rows: list[BadRow]
    """Rows that were left out, with their places."""
    num_rows: int
    """Number of all rows that were read, including bad ones."""
    first_columns: tuple[str, ...] = ()
    """Columns of the first raw row, for messages."""
    unused_columns: tuple[str, ...] = ()
    """Columns that the data set does not read, without `IGNORED_COLUMNS`."""
    data_config: DatasetConfig
    """The configuration of the data set."""

    @property
    def task_name(self) -> str | None:
        """Name of the environment that grades the answers. It is also the key in a mapping of processors."""
        return self.data_config.env_name

    @property
    def task_spec(self) -> TaskDataSpec:
        """Prompt and system texts of the rows, for `AllTaskProcessedDataset`."""
        entry = self.data_config
        return TaskDataSpec(entry.env_name, entry.prompt_file, entry.system_prompt_file)

    @property
    def processor(self) -> TaskDataProcessFnCallable:
        """Function that turns rows into data, for `AllTaskProcessedDataset`."""
        return get_processor(self.data_config.processor)

    def take_rows(self, table: RowTable, rows: "FormattedRows") -> None:
        """Use the usable rows of a table as this data set."""
        self.dataset, self.bad_rows, self.num_rows = rows, rows.bad_rows, table.num_rows
        if len(table.rows):  # the first row of a table is not read, because that would decode its images
            self.first_columns = tuple(table.rows.column_names if is_table(table.rows) else table.rows[0])
        self.unused_columns = tuple(sorted(set(rows.columns) - rows.columns_read - IGNORED_COLUMNS))

    def draw_rows(self, max_samples: int | None, seed: int) -> None:
        """Keep at most `max_samples` of the usable rows, in the file's order.

        Args:
            max_samples: Largest number of rows, or None to keep all rows.
            seed: Seed of the choice of rows.
        """
        total = len(self.dataset)
        if max_samples is None or total <= max_samples:
            return
        order = np.random.default_rng(seed).permutation(total)
        self.dataset = RowView(self.dataset, np.sort(order[:max_samples]))

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Reserve randomly chosen rows for validation. Both parts keep the file's order.

        Args:
            test_size: Share of the rows (below 1) or number of rows to reserve. With 0, no rows are reserved.
            seed: Seed of the choice of rows.

        Raises:
            DataError: No row would be left on one of the two sides.
        """
        if not test_size:
            return
        total = len(self.dataset)
        num_held_out = round(total * test_size) if test_size < 1 else int(test_size)
        if not 0 < num_held_out < total:
            raise DataError(
                f"split_validation_size={test_size} of {total} rows sets {num_held_out} aside; "
                "both sides need at least one row. Change it, or set it to 0."
            )
        order = np.random.default_rng(seed).permutation(total)
        rows = self.dataset
        self.val_dataset = RowView(rows, np.sort(order[:num_held_out]))
        self.dataset = RowView(rows, np.sort(order[num_held_out:]))


class GeneratedDataset(RawDataset):
    """A data set that generates its rows from a split, a number of rows and a seed."""

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Add validation rows without changing the training rows.

        Args:
            test_size: Number of validation rows, or (below 1) their share of the training rows.
            seed: Seed of the choice of validation rows.
        """
        if test_size:
            share = len(self.dataset) * test_size if test_size < 1 else test_size
            self.val_dataset = self._draw("validation", max(1, round(share)), seed)

    def _draw(self, split: str, num_samples: int, seed: int) -> Sequence[FormattedRow]:
        raise NotImplementedError


class GeneratedRows(Sequence[FormattedRow]):
    """Formatted rows, each of which is generated from its index when it is read.

    Args:
        split: "train" or "validation".
        num_samples: Number of rows.
        seed: Seed from which the rows' seeds are derived.
        task_name: Task name of every row.
    """

    def __init__(self, split: str, num_samples: int, seed: int, task_name: str | None) -> None:
        self._split = split
        self._num_samples = num_samples
        self._seed = seed
        self._task_name = task_name

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: Any) -> Any:
        return self._row(range(self._num_samples)[position])

    def _row(self, index: int) -> FormattedRow:
        raise NotImplementedError


class FormattedRows(Sequence[FormattedRow]):
    """The usable rows of a table, which are formatted when they are read.

    Args:
        table: Raw rows with places.
        columns: Columns that `format_row` reads. Only these columns are checked. If the column `images` is not among
            them, it fills the places of images in the messages.
        format_row: Function that returns the messages of a raw row, or raises `RowError`.
        task_name: Task name of every row.
        key: Key for the value that `format_row` returns.
        keys_below: Function that returns the names of unused keys inside the columns of a row.
    """

    def __init__(
        self,
        table: RowTable,
        columns: Sequence[str],
        format_row: Callable[[Row], Any],
        task_name: str | None,
        key: str = "messages",
        keys_below: Callable[[Row], Iterable[str]] = lambda row: (),
    ) -> None:
        self.table = table
        """The raw rows of the table."""
        self._key = key
        self._format_row = format_row
        self._task_name = task_name
        self.bad_rows = list(table.bad_rows)
        self._nulls = ArrowNulls(table.rows) if is_table(table.rows) else None
        self._folder = folder_of(table)
        self._fills = IMAGES not in columns
        columns = [*columns, IMAGES] if self._fills else columns
        self._undecoded = undecoded(table, columns)
        self.columns = dict.fromkeys(table.rows.column_names if is_table(table.rows) else ())
        """Columns of the rows, as keys."""
        self.columns_read = frozenset(columns)
        """Columns that `format_row` reads."""
        usable = []
        for index, row in _scan(table, columns, self._undecoded):
            try:
                if row is None:
                    raise RowError(NOT_UTF8)
                if not isinstance(row, Mapping):
                    raise RowError(f"a {type(row).__name__}, not a row with columns")
                row = row if self._nulls is None else self._nulls.removed(dict(row))
                self.columns |= dict.fromkeys((*row, *keys_below(row)))
                self._formatted(row)
                usable.append(index)
            except RowError as error:
                self.bad_rows.append(BadRow(table.name, table.lines[index], str(error)))
            except _ODD_VALUE as error:
                reason = f"cannot be read ({type(error).__name__}: {error})"
                self.bad_rows.append(BadRow(table.name, table.lines[index], reason))
        self.indices = np.array(usable, dtype=np.int64)
        """[rows] int64, indices of the usable rows in the table."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        rows = self.table.rows if self._undecoded is None else self._undecoded
        row = rows[int(self.indices[position])]
        row = row if self._nulls is None else self._nulls.removed(dict(row))
        return {**row, self._key: self._formatted(row), "task_name": self._task_name}

    def _formatted(self, row: Row) -> Any:
        return with_images(self._format_row(row), row, self._folder, fills=self._fills)

    def place(self, position: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""
        return self.table.name, self.table.lines[int(self.indices[position])]


class RowView(Sequence[FormattedRow]):
    """Some rows of a sequence."""

    def __init__(self, rows: Sequence[FormattedRow], indices: np.ndarray) -> None:
        self.rows = rows
        self.indices = indices
        """[rows] int64, indices into the sequence."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        return self.rows[int(self.indices[position])]

    def place(self, position: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""
        return row_place(self.rows, int(self.indices[position]))


def row_place(rows: Sequence[FormattedRow], position: int) -> tuple[str, int]:
    """Return the place of a row, or its index if the rows have no places."""
    place = getattr(rows, "place", None)
    return (type(rows).__name__, position) if place is None else place(position)


def _scan(table: RowTable, columns: Sequence[str], images: UndecodedRows | None) -> Iterator[tuple[int, Row | None]]:
    """Yield each row with at least the given columns. Yield None for a row that is not valid UTF-8."""
    rows = table.rows
    if not is_table(rows):
        yield from enumerate(rows)
        return
    present = [column for column in columns if column in rows.column_names]
    narrow = rows.select_columns(present)
    for start in range(0, len(rows), _SCAN_ROWS):
        stop = min(start + _SCAN_ROWS, len(rows))
        try:
            if images is not None:
                yield from enumerate(images.batch(start, stop, present), start)
                continue
            batch = narrow[start:stop]
            for offset in range(stop - start):
                yield start + offset, {column: batch[column][offset] for column in present}
        except UnicodeDecodeError:
            for index in range(start, stop):
                yield index, _row_or_none(narrow, index)


def _row_or_none(rows: "datasets.Dataset", index: int) -> Row | None:
    try:
        return rows[index]
    except UnicodeDecodeError:
        return None
