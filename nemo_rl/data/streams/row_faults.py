"""Count and report rows that were drawn for training but not used, because they are too long or unusable."""

import logging
from collections.abc import Collection
from typing import Any

from nemo_rl.data.bad_rows import PLACES_SHOWN
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)


class RowFaults:
    """Report rows that are not used for training, by file and line.

    Args:
        dataset: Data with `place(i)`.
        num_rows: Number of rows of an epoch.
        max_bad_row_share: Largest share of unusable rows in an epoch.

    Attributes:
        num_over_long: Number of prompts so far that were too long.
        num_unusable: Number of rows so far that could not be rendered or encoded.
    """

    def __init__(self, dataset: Any, num_rows: int, max_bad_row_share: float) -> None:
        self.num_over_long = self.num_unusable = 0
        self._dataset = dataset
        self._num_rows = num_rows
        self._max_bad_row_share = max_bad_row_share
        self._before = (0, 0)
        """Values of `num_over_long` and `num_unusable` before this epoch."""

    def note(self, batch: Any, counted: Collection[int] = ()) -> None:
        """Report the rows of a batch that are not used for training, and remove their faults from the batch.

        Args:
            batch: A collated batch.
            counted: Indices of rows that an earlier process has already reported if they cannot be used.

        Raises:
            DataError: Too many rows of this epoch cannot be used.
        """
        if "loss_multiplier" not in batch:
            return
        multipliers = dict(zip(batch["idx"], batch["loss_multiplier"].tolist(), strict=True))
        faults = dict(zip(batch["idx"], batch.pop("fault", ()), strict=False))
        for idx, multiplier in multipliers.items():
            if multiplier or idx in counted:
                continue
            fault = faults.get(idx)
            self.num_over_long += fault is None
            self.num_unusable += fault is not None
            if (self.num_over_long if fault is None else self.num_unusable) <= PLACES_SHOWN:
                file, line = self._dataset.place(idx)
                reason = fault or "longer than data.max_input_seq_length"
                logger.warning("%s:%s: %s; kept with loss_multiplier 0.", file, line, reason)
        self._check_share()

    def begin_epoch(self) -> None:
        """Start to count the rows of a new epoch."""
        self._before = self.num_over_long, self.num_unusable

    def report(self) -> None:
        """Log the number of rows of this epoch that were not used for training."""
        over_long, unusable = self._before
        if self.num_over_long > over_long:
            logger.warning(
                "%d rows of this epoch were longer than data.max_input_seq_length; they were "
                "cut to a stub and did not train the model.",
                self.num_over_long - over_long,
            )
        if self.num_unusable > unusable:
            logger.warning("%d rows of this epoch could not be used.", self.num_unusable - unusable)

    def _check_share(self) -> None:
        num_unusable = self.num_unusable - self._before[1]
        if num_unusable > self._max_bad_row_share * self._num_rows:
            raise DataError(
                f"{num_unusable} of {self._num_rows} training rows could not be used, more than "
                f"data.max_bad_row_share={self._max_bad_row_share:g} allows; the log names the first ones. "
                "Fix them, or raise that key to train on the rest."
            )
