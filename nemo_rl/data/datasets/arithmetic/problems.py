"""Generates sums, the task of the quick start, and products, the task of a model with a calculator.

Chosen with `dataset_name: arithmetic` or `arithmetic_products`; needs no file and no network. Invariant: training and
validation never share operands, for all seeds and sizes.

The split depends on the sum alone: a hash of its sorted operands puts one sum in ten into
validation, the rest into training. So `37+85` and `85+37` are in the same split.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from nemo_rl.config import DatasetConfig, report_findings
from nemo_rl.config.rules.data import check_operands
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RawDataset
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
        task_name: Put into every row.
        sign: Sign between the operands.
        result: Computes the answer from the operands, as Python integers.
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


class ArithmeticDataset(RawDataset):
    """Sums of integers, determined by the arguments alone; a subclass computes something else from the operands.

    No sum is repeated if the split has enough different sums (for up to two million possible sums;
    above that, repeats are rare).

    Args:
        split: "train" or "validation".
        num_samples: Number of sums; None means 10,000 for training, 256 for validation.
        min_operand: Smallest operand.
        max_operand: Largest operand, inclusive.
        num_operands: 2 or 3.
        seed: Chooses and orders the sums.
        task_name: Put into every row.

    Raises:
        ConfigError, DataError: An argument is out of range, or the split has no sum at all.
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
        """Make the sums for an entry of `data.train` or `data.validation`."""
        return cls(
            split=config.split or role,
            num_samples=config.num_samples,
            min_operand=config.min_operand,
            max_operand=config.max_operand,
            seed=config.seed,
            task_name=config.env_name,
        )

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Add validation sums; the training sums stay as they are.

        Args:
            test_size: Number of validation sums, or (below 1) their share of the training sums.
            seed: Chooses the validation sums.
        """
        if test_size:
            share = len(self.dataset) * test_size if test_size < 1 else test_size
            self.val_dataset = self._draw(VALIDATION, max(1, round(share)), seed)

    def _draw(self, split: str, num_samples: int, seed: int) -> ArithmeticRows:
        low, high, num_operands = self._limits
        rng = np.random.default_rng(derive_seed(seed, "arithmetic", split))
        space = (high - low + 1) ** num_operands
        draw = _draw_enumerated if space <= _ENUMERABLE else _draw_at_random
        return self._rows_of(draw(rng, split, num_samples, self._limits))

    def _rows_of(self, operands: np.ndarray) -> ArithmeticRows:
        return ArithmeticRows(operands, self._task_name)


class ProductsDataset(ArithmeticDataset):
    """Products of integers ("347*582="); arguments and split as for sums."""

    def _rows_of(self, operands: np.ndarray) -> ArithmeticRows:
        return ArithmeticRows(operands, self._task_name, "*", math.prod)


def is_validation(operands: np.ndarray) -> np.ndarray:
    """Return [N] bool: whether each of the sums [N, num_operands] belongs to validation."""
    hashed = np.zeros(len(operands), dtype=np.uint64)
    for column in np.sort(operands, axis=1).astype(np.int64).view(np.uint64).T:
        hashed = _mix(hashed ^ column)
    return hashed % np.uint64(VALIDATION_ONE_IN) == 0


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 step (Steele et al. 2014), a bijection that scatters close numbers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _draw_enumerated(
    rng: np.random.Generator, split: str, num_samples: int, limits: tuple[int, int, int]
) -> np.ndarray:
    """Return all sums of the split in a random order, repeated as often as needed."""
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
