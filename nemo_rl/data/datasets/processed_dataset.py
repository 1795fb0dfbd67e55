"""Convert each formatted row to a datum with token ids when the row is read.

Invariant: `dataset[i]` depends only on the rows, so all worker processes and resumed runs yield the same datum.
"""

import bisect
import copy
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from nemo_rl.data.bad_rows import BadRow, summarize_bad_rows
from nemo_rl.data.datasets.raw_dataset import RowView, row_place
from nemo_rl.data.interfaces import (
    DatumSpec,
    TaskDataPreProcessFnCallable,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.conversations import cut_to_stub
from nemo_rl.host.boundary import Boundary, time_limit
from nemo_rl.utils.errors import DataError, DeadlineExceededError

logger = logging.getLogger(__name__)

TOO_LONG = "longer than data.max_input_seq_length"

_LENGTHS = ("length", "length_chosen", "length_rejected")

CHECKED_ROWS = 50_000
"""Largest number of rows whose content `MixedDataset.checksum` reads."""

ROW_LIMIT_S = 60.0
"""Time limit in seconds for one row. A chat template or a processor may not end for unexpected input."""

TaskProcessors = TaskDataProcessFnCallable | Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]
TaskPreprocessors = TaskDataPreProcessFnCallable | Mapping[str, TaskDataPreProcessFnCallable]


class AllTaskProcessedDataset(Dataset[DatumSpec]):
    """Rows of one or several tasks, each with its processor.

    Args:
        dataset: Rows with `[i]` and `len()`. With a mapping of processors, each row must have `task_name`.
        default_task_data_spec: Specification of tasks without one.
        task_data_processors: One processor for all rows, or (spec, processor) by task name.
        task_data_preprocessors: Function that is applied to a row before its processor, or functions by task name.
        max_seq_length: Largest number of tokens of a prompt, or None for no limit.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: TokenizerType,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: TaskProcessors,
        task_data_preprocessors: TaskPreprocessors | None = None,
        max_seq_length: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.task_data_preprocessors = task_data_preprocessors
        self.max_seq_length = max_seq_length
        self.stand_in: DatumSpec | None = None
        """Datum with loss weight 0 that replaces a row that cannot be processed. Its `fault` is the reason. If None,
        the error of such a row is raised. `leave_out_unusable` sets it."""
        if isinstance(task_data_processors, Mapping):
            for spec, _ in task_data_processors.values():
                spec.copy_defaults(default_task_data_spec)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        """Process row `idx`. If this fails and there is a `stand_in`, return the `stand_in`.

        Raises:
            DataError: The row's task has no processor, or the row cannot be rendered.
        """
        if self.stand_in is None:
            return self._process(idx)
        with Boundary(Exception) as caught:  # chat template and processor may be user code
            return self._process(idx)
        datum = copy.deepcopy(self.stand_in)
        datum["idx"], datum["fault"] = idx, _reason(caught.take())
        return datum

    def leave_out_unusable(self, num_tried: int, *, over_long: bool) -> list[BadRow]:
        """Process the first rows and leave out unusable ones. Later unusable rows are replaced by `stand_in`.

        Args:
            num_tried: Number of rows to process.
            over_long: Whether to leave out rows above `max_seq_length`. If False, a warning says how many there are.

        Returns:
            The rows left out.

        Raises:
            DataError: None of the rows tried can be used.
        """
        bad: dict[int, BadRow] = {}
        num_weightless = 0
        num_tried = min(num_tried, len(self))
        for idx in range(num_tried):
            with Boundary(Exception) as caught:  # chat template and processor may be user code
                datum = self._process(idx)
            if caught:
                error = caught.take()
                if isinstance(error, DeadlineExceededError):
                    raise DataError(f"{BadRow(*self.place(idx), str(error))}: {error}.")
                bad[idx] = BadRow(*self.place(idx), _reason(error))
                continue
            self.stand_in = self.stand_in or datum
            if not datum["loss_multiplier"]:
                num_weightless += 1
                if over_long:
                    bad[idx] = BadRow(*self.place(idx), f"{self._too_long} tokens")
        if not num_tried:
            return []
        if self.stand_in is None or len(bad) == num_tried:
            raise DataError(f"no row can be used: {summarize_bad_rows([*bad.values()], num_tried)}")
        cut_to_stub(self.stand_in, self.max_seq_length)
        if num_weightless and not over_long:
            logger.warning(
                "%d of the first %d rows of %s are %s tokens; they are not sampled and not trained on.",
                num_weightless,
                num_tried,
                self.place(0)[0],
                self._too_long,
            )
        if bad:
            kept = np.array([idx for idx in range(len(self)) if idx not in bad], dtype=np.int64)
            self.dataset = RowView(self.dataset, kept)
        return list(bad.values())

    @property
    def _too_long(self) -> str:
        return f"{TOO_LONG}={self.max_seq_length}"

    def length_that_keeps(self, share: float, num_tried: int) -> int | None:
        """Return the length in tokens that a share of the first usable rows does not exceed, or None without rows."""
        lengths = []
        for idx in range(min(num_tried, len(self))):
            with suppress(DataError):
                datum: Mapping[str, Any] = self._process(idx)
                lengths.append(max(datum[key] for key in _LENGTHS if key in datum))
        return sorted(lengths)[max(0, math.ceil(share * len(lengths)) - 1)] if lengths else None

    def _process(self, idx: int) -> DatumSpec:
        with time_limit(ROW_LIMIT_S, "making a prompt of the row (chat template, processor)"):
            return self._datum(idx)

    def _datum(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        preprocess = self.task_data_preprocessors
        if isinstance(preprocess, Mapping):
            preprocess = preprocess.get(row["task_name"])
        if preprocess is not None:
            row = preprocess(row)
        spec, process = self.default_task_data_spec, self.task_data_processors
        if isinstance(process, Mapping):
            if row["task_name"] not in process:
                raise DataError(
                    f"row {idx} has task {row['task_name']!r}, for which there is no processor; "
                    f"there are: {', '.join(process)}."
                )
            spec, process = process[row["task_name"]]
        datum = process(row, spec, self.tokenizer, self.max_seq_length, idx)
        if spec.stop_strings and not datum.get("stop_strings"):
            datum["stop_strings"] = spec.stop_strings
        return datum

    def place(self, idx: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""
        return row_place(self.dataset, idx)

    def source(self, idx: int) -> Any:
        """Return a row before its processor."""
        return self.dataset[idx]


def _described(value: Any) -> str:
    """Return the hash of bytes, such as those of an image, or the type name of a value that JSON cannot represent."""
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    return type(value).__qualname__


def _reason(error: Exception) -> str:
    """Return the reason why a row cannot be processed, on one line."""
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


class RowsWithPlace(Protocol):
    """Interface of a part of a `MixedDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int, /) -> DatumSpec: ...

    def place(self, idx: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""


class MixedDataset(Dataset[DatumSpec]):
    """Several data sets, concatenated to one. `idx` counts the rows of all of them.

    Args:
        names: Name of the data set of each part, or None for a part without a name. An empty list means no names.
    """

    def __init__(self, parts: Sequence[RowsWithPlace], names: Sequence[str | None] = ()) -> None:
        self.parts = list(parts)
        """Data sets that were passed."""
        self.names = list(names) or [None] * len(self.parts)
        """One name, or None, for each part."""
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, idx: int) -> DatumSpec:
        """Process row `idx`."""
        part, position = self._find(idx)
        datum = part[position]
        datum["idx"] = idx
        return datum

    def place(self, idx: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""
        part, position = self._find(idx)
        return part.place(position)

    def checksum(self) -> str:
        """Return a checksum of the rows and their order, before they are processed.

        If there are more than `CHECKED_ROWS` rows, only this many are read, at equal distances. For data sets that a
        program passes as objects, only the number of rows is included. Of images in rows their bytes count, and of
        images in files only the paths.
        """
        total = len(self)
        chosen = range(total) if total <= CHECKED_ROWS else np.linspace(0, total - 1, CHECKED_ROWS).astype(int).tolist()
        digest = hashlib.sha256(str(total).encode())
        for idx in chosen:
            part, position = self._find(idx)
            source = getattr(part, "source", None)
            if source is not None:
                digest.update(json.dumps(source(position), sort_keys=True, default=_described).encode() + b"\n")
        return digest.hexdigest()

    @property
    def rows_by_name(self) -> dict[str, range]:
        """The indices of the rows of each named data set. The parts of a data set are adjacent."""
        found: dict[str, range] = {}
        for name, part, end in zip(self.names, self.parts, self._ends, strict=True):
            if name is not None:
                start = found[name].start if name in found else end - len(part)
                found[name] = range(start, end)
        return found

    def name_of(self, idx: int) -> str | None:
        """Return the name of the data set of a row."""
        return self.names[bisect.bisect(self._ends, idx)]

    def first_rows(self, limit: int) -> "ChosenRows":
        """Return the first rows of each part, in equal numbers if the parts are long enough.

        Args:
            limit: Number of rows of all parts together. Longer parts provide the rows that short parts lack.
        """
        counts, left = [0] * len(self.parts), min(limit, len(self))
        ranked = sorted(range(len(self.parts)), key=lambda index: len(self.parts[index]))
        for num_parts, index in zip(range(len(ranked), 0, -1), ranked, strict=True):
            counts[index] = min(len(self.parts[index]), left // num_parts)
            left -= counts[index]
        starts = [end - len(part) for part, end in zip(self.parts, self._ends, strict=True)]
        return ChosenRows(self, [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)])

    def _find(self, idx: int) -> tuple[RowsWithPlace, int]:
        if not 0 <= idx < len(self):
            raise IndexError(f"row {idx} of {len(self)}")
        start = 0
        for part, end in zip(self.parts, self._ends, strict=True):
            if idx < end:
                return part, idx - start
            start = end
        raise AssertionError("ends cover all rows")


@dataclass(frozen=True)
class ChosenRows(Dataset[DatumSpec]):
    """Some rows of a data set, with their `idx` in that data set."""

    dataset: MixedDataset
    """The data set."""
    rows: Sequence[int]
    """Indices of the rows, in order."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> DatumSpec:
        """Process the row at a position."""
        return self.dataset[self.rows[position]]

    def place(self, idx: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row of the data set."""
        return self.dataset.place(idx)
