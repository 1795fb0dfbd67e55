"""The rows of one data set of a mixture, epoch after epoch."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.data.loader import EpochSampler
from nemo_rl.data.streams.prompt_stream import PromptPosition
from nemo_rl.utils.seed import derive_seed


class DataSetRows:
    """Draws the rows of a data set, each once per epoch.

    Invariant: the order of an epoch depends on the run's seed, the name and the epoch, and not on other data sets.

    Args:
        name: of the data set.
        rows: its rows in the data of all sets.
        shuffle: whether each epoch has a new order.
    """

    def __init__(self, name: str, rows: range, shuffle: bool, seed: int) -> None:
        self.rows = rows
        self._sampler = EpochSampler(len(rows), shuffle, derive_seed(seed, "data_set", name))
        self._epoch = self._num_done = 0

    @property
    def epochs(self) -> float:
        """Passes over the rows so far, with the part of the running one."""
        return self._epoch + self._num_done / len(self.rows)

    def draw(self) -> PromptPosition:
        """Return the next row, with the epoch of this data set."""
        row = self.rows[self._sampler.order(self._epoch)[self._num_done]]
        position = PromptPosition(self._epoch, row)
        self._num_done += 1
        if self._num_done == len(self.rows):
            self._epoch, self._num_done = self._epoch + 1, 0
        return position

    def state_dict(self) -> dict[str, int]:
        """Return finished epochs, rows drawn in the running one, and rows of an epoch."""
        return {"epoch": self._epoch, "num_done": self._num_done, "num_rows": len(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows of a state; with fewer rows than those, at the next epoch."""
        self._epoch, self._num_done = state["epoch"], state["num_done"]
        if self._num_done >= len(self.rows):
            self._epoch, self._num_done = self._epoch + 1, 0
