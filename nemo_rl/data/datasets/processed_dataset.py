"""Formatted rows as data with token ids, processed when they are asked for.

Between raw data sets and the loader. Law: `dataset[i]` depends on row i only, so any worker
process and any resumed run gives the same datum.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from nemo_rl.data.datasets.raw_dataset import row_place
from nemo_rl.data.interfaces import (
    DatumSpec,
    TaskDataPreProcessFnCallable,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.utils.errors import DataError

TaskProcessors = TaskDataProcessFnCallable | Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]
TaskPreprocessors = TaskDataPreProcessFnCallable | Mapping[str, TaskDataPreProcessFnCallable]


class AllTaskProcessedDataset(Dataset[DatumSpec]):
    """Rows of one or several tasks, each with its processor.

    Args:
        dataset: Rows with `[i]` and `len()`; with a mapping of processors each row has `task_name`.
        tokenizer: Given to the processors.
        default_task_data_spec: Prompts of a task that brings none of its own.
        task_data_processors: One processor for all rows, or (spec, processor) by task name.
        task_data_preprocessors: Applied to a row before its processor: one, or by task name.
        max_seq_length: Longest prompt in tokens; None is no limit.
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
        if isinstance(task_data_processors, Mapping):
            for spec, _ in task_data_processors.values():
                spec.copy_defaults(default_task_data_spec)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        """Process row `idx`.

        Raises:
            DataError: The row's task has no processor, or the row cannot be rendered.
        """
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
        return process(row, spec, self.tokenizer, self.max_seq_length, idx)

    def place(self, idx: int) -> tuple[str, int]:
        """File (or data set) and line of a row."""
        return row_place(self.dataset, idx)


class MixedDataset(Dataset[DatumSpec]):
    """Several data sets one after another, as one; `idx` counts through all of them.

    Attributes:
        parts: The data sets, in order.
    """

    def __init__(self, parts: Sequence[AllTaskProcessedDataset]) -> None:
        self.parts = list(parts)
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
        """File (or data set) and line of a row."""
        part, position = self._find(idx)
        return part.place(position)

    def _find(self, idx: int) -> tuple[AllTaskProcessedDataset, int]:
        if not 0 <= idx < len(self):
            raise IndexError(f"row {idx} of {len(self)}")
        start = 0
        for part, end in zip(self.parts, self._ends, strict=True):
            if idx < end:
                return part, idx - start
            start = end
        raise AssertionError("ends cover all rows")
