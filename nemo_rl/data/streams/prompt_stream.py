"""Stream batches of prompts over the epochs of a loader, with a position that a checkpoint stores.

    loader ─► next_batch ─► rows and their positions ─► ... trained on ─► acknowledge(positions), in any order

Invariant: the stored position describes exactly the prompts that were not trained on yet. These are all prompts after a
point in the loader's order, and those before this point that were not acknowledged. A new stream that loads the
position returns each of these prompts once.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from nemo_rl.data.loader import PromptLoader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError


class StoredPart(Protocol):
    """Interface of state that is stored with the position, such as groups that were sampled ahead of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, and lists and dicts of these."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a stored state, and call `Prompts.claim` for the prompts whose groups are restored."""


class StoredParts:
    """The parts whose state a stream stores, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, StoredPart] = {}

    def attach(self, name: str, part: StoredPart) -> None:
        """Add a part, or replace the part with the same name."""
        self._parts[name] = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each part that has a stored state."""
        for name in self._parts.keys() & state.keys():
            self._parts[name].load_state_dict(state[name])


def unfinished_state(outstanding: Iterable[tuple[int, int]], parts: StoredParts) -> dict[str, Any]:
    """Return the part of a stream's state about prompts that were drawn but not trained on.

    Args:
        outstanding: epoch and row of each such prompt.
        parts: the parts that store the groups of these prompts.

    Returns:
        `outstanding`, a list of `[epoch, row]`, and `parts`, the state of each part by its name. Empty values are left
        out.
    """
    entries = {"outstanding": [list(position) for position in outstanding], "parts": parts.state_dict()}
    return {name: entry for name, entry in entries.items() if entry}


logger = logging.getLogger(__name__)


class DataExhausted(Exception):  # noqa: N818
    """Error that the training data has no further batch, or none with different rewards. The run then ends normally."""


class PromptPosition(NamedTuple):
    """A prompt of one pass over the data."""

    epoch: int
    """Number of finished passes before this pass."""
    row: int
    """Index of the prompt's row in the data set."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are drawn at the same time."""

    rows: BatchedDataDict[Any]
    """The collated data."""
    positions: list[PromptPosition]
    """Position of each prompt, in the order of the rows. A prompt may have several rows, as with pairs."""


type GroupRewards = Mapping[PromptPosition, Sequence[float]]
"""Rewards of the samples of each prompt of a step, in order. Empty if there are no rewards."""


class Prompts(Protocol):
    """Interface of a stream of prompt batches over epochs, with a position that a checkpoint stores, for one thread."""

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one epoch."""

    def next_batch(self) -> PromptBatch:
        """Return the next batch.

        If a stored position with unacknowledged prompts was loaded, these prompts come first. Batches are then filled
        with the following prompts, so that the last batch of the run may be smaller.

        Raises:
            DataExhausted: all epochs are over.
        """

    def acknowledge(self, positions: Iterable[PromptPosition]) -> None:
        """Mark prompts as trained on or dropped, so that a resumed run does not return them again.

        Args:
            positions: positions that `next_batch` returned, in any order, each only once.

        Raises:
            ValueError: a prompt was never returned, or was acknowledged before.
        """

    def finish_step(self, step: int, rewards: GroupRewards) -> None:
        """Note that a step was trained on. The next prompts may depend on the step.

        Args:
            step: number of the step, from 1.
            rewards: rewards of the step's prompts.
        """

    def metrics(self, rewards: GroupRewards) -> dict[str, float]:
        """Return metrics of a step's data sets before `finish_step`, or none if data sets are not distinguished."""

    def attach(self, name: str, part: StoredPart) -> None:
        """Store and restore a part together with the position. Call this before the first step.

        Args:
            part: the part, which replaces an earlier part with the same name.
        """

    def claim(self, positions: Iterable[PromptPosition]) -> None:
        """Skip prompts whose groups a part has restored. They stay unacknowledged until they are trained on.

        Raises:
            ValueError: a prompt was acknowledged or claimed before.
            DataError: the data changed, and the stream will not return the prompt.
            DataExhausted: the data has no such prompt.
        """

    def prepare(self, positions: Sequence[PromptPosition]) -> PromptBatch:
        """Prepare claimed prompts again, to continue their groups."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def check_position(self, state: dict[str, Any]) -> None:
        """Raise an error if a stored position belongs to other data. The stream does not change.

        Raises:
            DataError: the position belongs to other data.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a stored position. This is only possible before the first batch.

        Raises:
            DataError: the position, or a group that a part restores, belongs to other data.
        """


class PromptStream:
    """Batches of one loader, which shuffles all rows together (`Prompts`).

    Args:
        loader: loader. One pass over it is an epoch.
        max_epochs: number of passes after which the stream ends.
    """

    def __init__(self, loader: PromptLoader, max_epochs: int):
        self._loader = loader
        self._max_epochs = max_epochs
        self._iterator: Any = None
        self._position = self._drawn_to()
        self._outstanding: dict[PromptPosition, None] = {}
        """Prompts before `_position` that were not acknowledged, in the order in which they were drawn."""
        self._untouched: deque[tuple[dict[str, Any], list[PromptPosition]]] = deque()
        """Batches drawn after `_position` without acknowledged prompts, with the position after each batch."""
        self._first: dict[PromptPosition, None] = {}
        """Prompts to return before the loader's next batch, in this order. They are not prepared yet."""
        self._restored: frozenset[PromptPosition] = frozenset()
        """Prompts that an earlier process drew. That process has already reported their faults."""
        self._changes: list[str] = []
        """Changes of the data since the loaded position was stored."""
        self._parts = StoredParts()

    @property
    def epoch(self) -> int:
        """Number of finished passes."""
        return self._loader.epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one pass."""
        return len(self._loader)

    def next_batch(self) -> PromptBatch:
        """Draw the next batch of prompts (`Prompts.next_batch`)."""
        size = self._batch_size
        while not self._first and self.epoch < self._max_epochs:
            epoch = self.epoch
            batch = self._full_batch()
            if batch is not None:
                return batch
            if self.epoch == epoch:
                self._take(size)
        while len(self._first) < size and self.epoch < self._max_epochs:
            self._take(size - len(self._first))
        if not self._first:
            raise DataExhausted(
                f"the training data ended after {self.epoch} passes (max_num_epochs={self._max_epochs})"
            )
        return self._first_batch()

    def acknowledge(self, positions: Iterable[PromptPosition]) -> None:
        """Mark prompts as trained on or dropped (`Prompts.acknowledge`)."""
        for position in positions:
            if position not in self._outstanding:
                self._move_after(position)
            del self._outstanding[position]

    def finish_step(self, step: int, rewards: GroupRewards) -> None:
        """Do nothing, because the order of the prompts is fixed. See `Prompts.finish_step`."""

    def metrics(self, rewards: GroupRewards) -> dict[str, float]:
        """Return the metrics of the stream (`Prompts.metrics`)."""
        return {}

    def attach(self, name: str, part: StoredPart) -> None:
        """Store and restore a part together with the position (`Prompts.attach`)."""
        self._parts.attach(name, part)

    def claim(self, positions: Iterable[PromptPosition]) -> None:
        """Skip prompts whose groups a part has restored (`Prompts.claim`)."""
        for position in positions:
            while position not in self._first:
                is_over = position.epoch < self.epoch or self.epoch >= self._max_epochs
                if is_over or position in self._outstanding:
                    raise self._not_to_come(position)
                self._take(self._batch_size)
            del self._first[position]

    def prepare(self, positions: Sequence[PromptPosition]) -> PromptBatch:
        """Prepare claimed prompts again (`Prompts.prepare`)."""
        rows = [position.row for position in positions]
        return PromptBatch(self._loader.prepare(rows, counted=set(rows)), list(positions))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, loader's state, and earlier prompts that were not trained on.

        See `unfinished_state` for the part about these prompts.
        """
        return self._position | unfinished_state(self._outstanding, self._parts)

    def check_position(self, state: dict[str, Any]) -> None:
        """Check that a stored position fits the data (`Prompts.check_position`)."""
        self._loader.check_position(state["loader"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a stored position (`Prompts.load_state_dict`)."""
        self._changes = self._loader.check_position(state["loader"])
        self._loader.load_state_dict(state["loader"])
        self._iterator = None
        self._position = self._drawn_to()
        self._untouched.clear()
        stored = [PromptPosition(*position) for position in state.get("outstanding", ())]
        self._outstanding = dict.fromkeys(p for p in stored if p.row < self._loader.num_rows)
        self._first = dict.fromkeys(self._outstanding)
        self._restored = frozenset(self._outstanding)
        self._parts.load_state_dict(state.get("parts", {}))
        if self._first:
            logger.info("%d prompts that were drawn but not trained on come first.", len(self._first))

    @property
    def _batch_size(self) -> int:
        assert self._loader.batch_size is not None
        return self._loader.batch_size

    def _full_batch(self) -> PromptBatch | None:
        """Return the loader's next batch, or None if this pass has no more full batches."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
        rows = next(self._iterator, None)
        if rows is None:
            self._iterator = None
            return None
        return PromptBatch(rows, self._note_drawn(self._loader.last_rows))

    def _take(self, num_prompts: int) -> None:
        """Draw up to `num_prompts` prompts without preparing them, or none if the pass ends and the next one begins."""
        epoch = self.epoch
        self._iterator = None
        rows = self._loader.take(num_prompts)
        if self.epoch == epoch:
            self._first |= dict.fromkeys(self._note_drawn(rows))

    def _first_batch(self) -> PromptBatch:
        """Prepare and return the next prompts that come before the loader's batches."""
        taken = list(islice(self._first, self._batch_size))
        for position in taken:
            del self._first[position]
        counted = {position.row for position in taken if position in self._restored}
        return PromptBatch(self._loader.prepare([position.row for position in taken], counted), taken)

    def _note_drawn(self, rows: list[int]) -> list[PromptPosition]:
        """Return the positions of newly drawn rows. If they begin a new batch, record the whole batch as drawn."""
        after = self._drawn_to()
        if after != (self._untouched[-1][0] if self._untouched else self._position):
            self._untouched.append((after, [PromptPosition(self.epoch, row) for row in self._loader.current_batch]))
        return [PromptPosition(self.epoch, row) for row in rows]

    def _not_to_come(self, position: PromptPosition) -> Exception:
        """Return the error of a claim for a prompt that the stream will not return."""
        if self._changes:
            return DataError(
                f"The checkpoint has sampled responses to row {position.row} of epoch {position.epoch}, which is not "
                f"among the prompts to come, because the data changed ({', '.join(self._changes)}). Resume with the "
                "same data and keys, or start a new run in another checkpoint_dir. Without data.shuffle, rows may be "
                "added at the end."
            )
        if position in self._outstanding or position.epoch < self.epoch:
            return ValueError(f"Row {position.row} of epoch {position.epoch} was acknowledged or claimed before.")
        return DataExhausted(
            f"row {position.row} of epoch {position.epoch} was claimed, but the training data ends after "
            f"{self._max_epochs} passes (max_num_epochs)"
        )

    def _move_after(self, position: PromptPosition) -> None:
        """Move the stored position after the batch of a prompt, so that all prompts before it become outstanding."""
        if not any(position in drawn for _, drawn in self._untouched):
            raise ValueError(
                f"Row {position.row} of epoch {position.epoch} was acknowledged, but it was never drawn, or was "
                "acknowledged before. Acknowledge each prompt once."
            )
        while position not in self._outstanding:
            self._position, drawn = self._untouched.popleft()
            self._outstanding |= dict.fromkeys(drawn)

    def _drawn_to(self) -> dict[str, Any]:
        """Return the position after all drawn prompts, in whole batches of a pass."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}
