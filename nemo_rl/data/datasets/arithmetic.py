"""Generate the built-in arithmetic data sets: problems with and without worked answers.

The quick starts use sums, and the example of a model with tools uses products.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from nemo_rl.config import DatasetConfig, report_findings
from nemo_rl.config.rules.data import check_operands
from nemo_rl.data.datasets.raw_dataset import FormattedRow, GeneratedDataset, RawDataset
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

TRAIN, VALIDATION = "train", "validation"
VALIDATION_ONE_IN = 10
DEFAULT_NUM_SAMPLES = {TRAIN: 10_000, VALIDATION: 256}

_ENUMERABLE = 2_000_000


class ArithmeticRows(Sequence[FormattedRow]):
    """Sums or products as formatted rows: `problem` ("37+85="), `answer` ("122"), `messages`, `task_name`.

    Args:
        operands: [num_samples, num_operands] int64.
        task_name: Task name of every row.
        sign: Sign between the operands.
        result: Function that computes the answer from the operands, given as Python integers.
    """

    def __init__(
        self,
        operands: np.ndarray,
        task_name: str | None,
        sign: str = "+",
        result: Callable[[Sequence[int]], int] = sum,
    ) -> None:
        self._operands = operands
        self._task_name = task_name
        self._sign = sign
        self._result = result

    def __len__(self) -> int:
        return len(self._operands)

    def __getitem__(self, position: Any) -> Any:
        numbers = self._operands[position].tolist()
        problem = self._sign.join(map(str, numbers)) + "="
        answer = str(self._result(numbers))
        return {
            "problem": problem,
            "answer": answer,
            "messages": [
                {"role": "user", "content": problem},
                {"role": "assistant", "content": answer},
            ],
            "task_name": self._task_name,
        }


class ArithmeticDataset(GeneratedDataset):
    """Sums of integers, which depend only on the arguments. Subclasses may use other operations.

    No sum is repeated if the split has enough different sums. With more than two million possible sums, repeats are
    possible but rare.

    Args:
        split: "train" or "validation".
        num_samples: Number of sums, or None for 10,000 in training and 256 in validation.
        min_operand: Smallest operand.
        max_operand: Largest operand, inclusive.
        num_operands: Number of operands, 2 or 3.
        seed: Seed of the choice and the order of the sums.
        task_name: Task name of every row.

    Raises:
        ConfigError, DataError: An argument is out of range, or the split has no sums.
    """

    def __init__(
        self,
        split: str = TRAIN,
        num_samples: int | None = None,
        min_operand: int = 10,
        max_operand: int = 99,
        num_operands: int = 2,
        seed: int = 42,
        task_name: str | None = None,
    ) -> None:
        if split not in DEFAULT_NUM_SAMPLES:
            raise DataError(f"arithmetic has no split {split!r}; choose {TRAIN} or {VALIDATION}.")
        if num_operands not in (2, 3):
            raise DataError(f"arithmetic adds 2 or 3 operands, not {num_operands}.")
        report_findings(check_operands("", min_operand, max_operand))
        num_samples = DEFAULT_NUM_SAMPLES[split] if num_samples is None else num_samples
        if num_samples < 1:
            raise DataError(f"arithmetic: num_samples={num_samples}; at least 1 is needed.")
        self._limits = (min_operand, max_operand, num_operands)
        self._task_name = task_name
        self.dataset = self._draw(split, num_samples, seed)
        self.bad_rows = []
        self.num_rows = num_samples

    @classmethod
    def of_entry(cls, config: DatasetConfig, role: str = TRAIN) -> Self:
        """Make the sums of a data set that `data.train` or `data.validation` configures."""
        return cls(
            split=config.split or role,
            num_samples=config.num_samples,
            min_operand=config.min_operand,
            max_operand=config.max_operand,
            seed=config.seed,
            task_name=config.env_name,
        )

    def _draw(self, split: str, num_samples: int, seed: int) -> ArithmeticRows:
        low, high, num_operands = self._limits
        rng = np.random.default_rng(derive_seed(seed, "arithmetic", split))
        space = (high - low + 1) ** num_operands
        draw = _draw_enumerated if space <= _ENUMERABLE else _draw_at_random
        return self._rows_of(draw(rng, split, num_samples, self._limits))

    def _rows_of(self, operands: np.ndarray) -> ArithmeticRows:
        return ArithmeticRows(operands, self._task_name)


class ProductsDataset(ArithmeticDataset):
    """Products of integers ("347*582="). Arguments and split are those of sums."""

    def _rows_of(self, operands: np.ndarray) -> ArithmeticRows:
        return ArithmeticRows(operands, self._task_name, "*", math.prod)


def is_validation(operands: np.ndarray) -> np.ndarray:
    """Return `[N]` bool: whether each sum of `[N, num_operands]` belongs to validation."""
    hashed = np.zeros(len(operands), dtype=np.uint64)
    for column in np.sort(operands, axis=1).astype(np.int64).view(np.uint64).T:
        hashed = _mix(hashed ^ column)
    return hashed % np.uint64(VALIDATION_ONE_IN) == 0


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 step (Steele et al. 2014), a bijection that maps close numbers to distant ones."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _draw_enumerated(
    rng: np.random.Generator, split: str, num_samples: int, limits: tuple[int, int, int]
) -> np.ndarray:
    """Return sums of the split in random order. If there are too few, repeat them."""
    low, high, num_operands = limits
    axes = np.meshgrid(*[np.arange(low, high + 1)] * num_operands, indexing="ij")
    sums = np.stack([axis.ravel() for axis in axes], axis=1)
    sums = sums[is_validation(sums) == (split == VALIDATION)]
    if not len(sums):
        raise DataError(f"arithmetic: operands {low} to {high} leave no sum for {split}; widen the range.")
    rounds = [rng.permutation(sums) for _ in range(-(-num_samples // len(sums)))]
    return np.concatenate(rounds)[:num_samples]


def _draw_at_random(rng: np.random.Generator, split: str, num_samples: int, limits: tuple[int, int, int]) -> np.ndarray:
    low, high, num_operands = limits
    kept: list[np.ndarray] = []
    missing = num_samples
    while missing > 0:
        sums = rng.integers(low, high + 1, size=(missing * 2 + 64, num_operands))
        kept.append(sums[is_validation(sums) == (split == VALIDATION)][:missing])
        missing -= len(kept[-1])
    return np.concatenate(kept)


OFFSETS = (-10, -2, -1, 1, 2, 10)
"""Differences of a wrong result from the right one."""


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
        """Add validation sums without changing the training sums."""
        self._sums.split_train_validation(test_size, seed)
        if self._sums.val_dataset is not None:
            self.val_dataset = self._rows(self._sums.val_dataset, VALIDATION)

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return WorkedRows(sums)


class WorkedPairsDataset(WorkedSumsDataset):
    """Pairs of a right worked answer of a sum and a copy of it with one wrong result."""

    def _rows(self, sums: Sequence[FormattedRow], split: str) -> Sequence[FormattedRow]:
        return PairRows(sums, derive_seed(self._config.seed, "arithmetic_preference", split))


class WorkedRows(Sequence[FormattedRow]):
    """Rows of `ArithmeticRows` whose answers are worked out."""

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
    """Rows with a `pair` of a right and a wrong answer, in the form of `preference_datasets`."""

    def __init__(self, sums: Sequence[FormattedRow], seed: int) -> None:
        self._sums = sums
        rng = np.random.default_rng(seed)
        self._wrong_step = rng.random(len(sums))
        self._offset = rng.choice(OFFSETS, len(sums))

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, position: Any) -> Any:
        row = self._sums[position]
        steps = steps_of(row["problem"])
        wrong = with_wrong_result(steps, int(self._wrong_step[position] * len(steps)), int(self._offset[position]))
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


def with_wrong_result(steps: Sequence[Sequence[int]], number: int, offset: int) -> list[list[int]]:
    """Return a copy of steps in which a step's result is changed by an offset, whose sign changes at negative results.

    Example:
        >>> with_wrong_result([[7, 5, 12]], 0, -2)
        [[7, 5, 10]]
    """
    changed = [list(step) for step in steps]
    step = changed[number]
    step[2] += offset if step[2] + offset >= 0 else -offset
    return changed


def write_out(steps: Sequence[Sequence[int]]) -> str:
    """Return the steps of a worked answer as text."""
    return ";".join(f"{a}+{b}={c}" for a, b, c in steps)
