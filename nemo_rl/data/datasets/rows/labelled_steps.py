"""Read data sets of answers whose steps are labelled right or wrong, and generate one.

The columns are those of TRL's data sets of stepwise supervision: a prompt, the list `completions` of the answer's
steps, and the list `labels` of true or false. Math-Shepherd (arXiv 2312.08935) and PRM800K (arXiv 2305.20050) are
published in this form. Invariant: a usable row has a label for each step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.config.base.names import ARITHMETIC_STEPS
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import OFFSETS, TRAIN, WorkedSumsDataset, steps_of, with_wrong_result, write_out
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.preference_datasets import prompt_messages, with_tools
from nemo_rl.data.datasets.raw_dataset import FormattedRow, FormattedRows, RawDataset, Row
from nemo_rl.data.datasets.registry import DatasetFactory, DatasetKind
from nemo_rl.data.datasets.rows.values import kind_of, plain_text, value_of
from nemo_rl.utils.seed import derive_seed

KEY = "labelled_steps"
"""Key of the content in a formatted row."""
_WRONG = 1 / 3
"""Share of generated steps with a wrong result."""


class LabelledStepsDataset(RawDataset):
    """Rows with a prompt (`prompt_key`), the steps of an answer (`steps_key`) and their labels (`labels_key`).

    Args:
        config: A data set of `data.train` or `data.validation`.
        role: "train" or "validation", which determines the default split.
        source: Location of a named data set, or None for any file or hub id.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN, source: HubSource | None = None) -> None:
        table = load_table(config, role, source or HubSource(None))
        self._keys = (config.prompt_key or "prompt", config.steps_key or "completions", config.labels_key or "labels")
        self._tool_key = config.tool_key or "tools"
        columns = [*self._keys, self._tool_key]
        self.take_rows(table, FormattedRows(table, columns, self._labelled, config.env_name, key=KEY))

    def _labelled(self, row: Row) -> dict[str, Any]:
        return with_tools(labelled_steps(row, *self._keys), row, self._tool_key)


def labelled_steps(
    row: Row, prompt_key: str = "prompt", steps_key: str = "completions", labels_key: str = "labels"
) -> dict[str, Any]:
    """Return prompt, steps and labels of a raw row.

    Raises:
        RowError: The steps are no texts, a label is neither true nor false, or their numbers differ.
    """
    steps, labels = (_list_of(row, key) for key in (steps_key, labels_key))
    if len(steps) != len(labels):
        raise RowError(f"{steps_key!r} has {len(steps)} steps, and {labels_key!r} has {len(labels)} labels")
    for number, label in enumerate(labels):
        if not isinstance(label, bool | int | float) or label not in (0, 1):
            shown = label if isinstance(label, int | float) else kind_of(label)
            raise RowError(f"label {number} of {labels_key!r} is {shown}, neither true nor false")
    texts = [plain_text(step, f"step {number} of {steps_key!r}") for number, step in enumerate(steps)]
    for number, text in enumerate(texts):
        if not text.strip():
            raise RowError(f"step {number} of {steps_key!r} is empty")
    prompt = prompt_messages(value_of(row, prompt_key), prompt_key)
    return {"prompt": prompt, "steps": texts, "labels": [bool(label) for label in labels]}


def _list_of(row: Row, key: str) -> list[Any]:
    values = value_of(row, key)
    if not isinstance(values, list):
        raise RowError(f"{key!r} is {kind_of(values)}, not a list")
    return values


class LabelledSumsDataset(WorkedSumsDataset):
    """Worked answers of sums, in which each step has a wrong result with the probability 1/3."""

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return LabelledStepRows(sums, derive_seed(self._config.seed, ARITHMETIC_STEPS, split))


class LabelledStepRows(Sequence[FormattedRow]):
    """Rows with the steps of a sum and their labels.

    Args:
        sums: The sums.
        seed: Seed of the errors.
    """

    def __init__(self, sums: Sequence[FormattedRow], seed: int) -> None:
        self._sums = sums
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, position: Any) -> Any:
        row = self._sums[position]
        steps = steps_of(row["problem"])
        rng = np.random.default_rng([self._seed, position])
        for number, is_wrong in enumerate(rng.random(len(steps)) < _WRONG):
            if is_wrong:
                steps = with_wrong_result(steps, number, int(rng.choice(OFFSETS)))
        content = {
            "prompt": [row["messages"][0]],
            "steps": [write_out([step]) for step in steps],
            "labels": [a + b == c for a, b, c in steps],
        }
        return {KEY: content, "task_name": row["task_name"]}


_NAMED: dict[str, DatasetFactory] = {
    "math_shepherd": partial(LabelledStepsDataset, source=HubSource("trl-lib/math_shepherd", validation_split="test")),
    "prm800k": partial(LabelledStepsDataset, source=HubSource("trl-lib/prm800k", validation_split="test")),
    "LabelledStepsDataset": LabelledStepsDataset,
    ARITHMETIC_STEPS: LabelledSumsDataset,
}


def load_labelled_steps(config: DatasetConfig, role: str = TRAIN) -> RawDataset:
    """Load a configured data set of answers with labelled steps (`DatasetKind.load`)."""
    return DatasetKind("LabelledStepsDataset", _NAMED, KEY, labelled_steps).load(config, role)
