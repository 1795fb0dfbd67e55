"""Generates sums with written-out steps, the data of the quick starts of SFT, DPO and reward models.

`arithmetic_sft` answers `37+85=` with `7+5=12;30+80=110;12+110=122`; `arithmetic_preference` pairs this answer with a
copy that has one wrong result. Invariant: rows depend on the configuration alone, and training and validation share no
sum (see `arithmetic`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic.problems import TRAIN, VALIDATION, ArithmeticDataset
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RawDataset
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

_OFFSETS = (-10, -2, -1, 1, 2, 10)


class WorkedSumsDataset(RawDataset):
    """Sums of two numbers with worked answers, as conversations.

    Args:
        config: `num_samples`, `min_operand`, `max_operand`, `seed` and `split` are used.
        role: "train" or "validation".
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        if config.min_operand < 0:
            raise DataError(
                f"{config.dataset_name} adds digits: min_operand={config.min_operand} must not be negative."
            )
        self._config = config
        self._sums = ArithmeticDataset.of_entry(config, role)
        self.dataset = self._rows(self._sums.dataset, config.split or role)
        self.bad_rows = []
        self.num_rows = len(self.dataset)

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Add validation sums; the training sums stay as they are."""
        self._sums.split_train_validation(test_size, seed)
        if self._sums.val_dataset is not None:
            self.val_dataset = self._rows(self._sums.val_dataset, VALIDATION)

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return WorkedRows(sums)


class WorkedPairsDataset(WorkedSumsDataset):
    """Sums with a right worked answer and a copy in which one result is wrong."""

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return PairRows(sums, derive_seed(self._config.seed, "arithmetic_preference", split))


class WorkedRows(Sequence[FormattedRow]):
    """Rows of `arithmetic` whose answer is written out."""

    def __init__(self, sums: Sequence[FormattedRow]) -> None:
        self._sums = sums

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, position: Any) -> Any:
        row = self._sums[position]
        question = row["messages"][0]
        answer = write_out(steps_of(row["problem"]))
        return {**row, "messages": [question, {"role": "assistant", "content": answer}]}


class PairRows(Sequence[FormattedRow]):
    """Rows with `pair`: the right answer and the wrong one, as `preference_datasets` formats them."""

    def __init__(self, sums: Sequence[FormattedRow], seed: int) -> None:
        self._sums = sums
        rng = np.random.default_rng(seed)
        self._wrong_step = rng.random(len(sums))
        self._offset = rng.choice(_OFFSETS, len(sums))

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, position: Any) -> Any:
        row = self._sums[position]
        steps = steps_of(row["problem"])
        wrong = [list(step) for step in steps]
        step = wrong[int(self._wrong_step[position] * len(steps))]
        offset = int(self._offset[position])
        step[2] += offset if step[2] + offset >= 0 else -offset
        pair = {
            "context": [row["messages"][0]],
            "completions": [
                {"rank": rank, "completion": [{"role": "assistant", "content": write_out(answer)}]}
                for rank, answer in enumerate((steps, wrong))
            ],
        }
        return {"pair": pair, "task_name": row["task_name"]}


def steps_of(problem: str) -> list[list[int]]:
    """Return the additions that lead to a sum, digit by digit, each as `[left, right, result]`.

    Example:
        >>> steps_of("37+85=")
        [[7, 5, 12], [30, 80, 110], [12, 110, 122]]
    """
    left, right = (int(number) for number in problem.rstrip("=").split("+"))
    steps: list[list[int]] = []
    total, unit = 0, 1
    while unit == 1 or left // unit or right // unit:
        a, b = (number // unit % 10 * unit for number in (left, right))
        steps.append([a, b, a + b])
        if unit > 1:
            steps.append([total, a + b, total + a + b])
        total += a + b
        unit *= 10
    return steps


def write_out(steps: Sequence[Sequence[int]]) -> str:
    """Return the steps as text."""
    return ";".join(f"{a}+{b}={c}" for a, b, c in steps)
