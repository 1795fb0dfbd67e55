"""Batches of prompts over the epochs of a loader, and the position in them that a checkpoint stores.

    loader ─► next_batch ─► rows and their positions ─► ... trained on ─► acknowledge(positions), in any order

Invariant: the stored position is exactly the set of prompts that are not trained on yet: all prompts after a point in
the loader's order, and those before it that were not acknowledged. A fresh stream that loads the position returns each
of them once.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nemo_rl.config import RolloutMasterConfig, SupervisedMasterConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.loader import PromptLoader, build_loader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

logger = logging.getLogger(__name__)


class DataExhausted(Exception):  # noqa: N818
    """The training data has no further batch, or none with differing rewards; ends the run normally."""


class PromptPosition(NamedTuple):
    """One prompt of one pass over the data.

    Attributes:
        epoch: passes that were finished before it.
        row: its row in the data set.
    """

    epoch: int
    row: int


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are drawn together.

    Attributes:
        rows: the collated data.
        positions: one for each prompt, in the order of the rows. A prompt may take several rows, as a pair does.
    """

    rows: BatchedDataDict[Any]
    positions: list[PromptPosition]


class StoredPart(Protocol):
    """State that is stored with the position, such as groups that were sampled ahead of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, plain values, and lists and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a stored state; a part that holds groups calls `PromptStream.claim` for their prompts."""


class PromptStream:
    """Batches of prompts, epoch after epoch. Used from one thread.

    Args:
        loader: one pass over it is an epoch.
        max_epochs: passes before the stream ends.

    Attributes:
        epoch: finished passes.
    """

    def __init__(self, loader: PromptLoader, max_epochs: int):
        self._loader = loader
        self._max_epochs = max_epochs
        self._iterator: Any = None
        self.epoch = 0
        self._position = self._drawn_to()
        self._outstanding: dict[PromptPosition, None] = {}
        """Prompts before `_position` that were not acknowledged, in the order they were drawn."""
        self._untouched: deque[tuple[dict[str, Any], list[PromptPosition]]] = deque()
        """Batches drawn after `_position`, none of whose prompts was acknowledged, each with the position after it."""
        self._again: list[PromptPosition] = []
        """Prompts to return before the next batch of the loader."""
        self._parts: dict[str, StoredPart] = {}

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass."""
        return len(self._loader)

    def next_batch(self) -> PromptBatch:
        """Return the next batch.

        After a stored position with unacknowledged prompts was loaded, these come first. Batches are then filled with
        the prompts that follow, so the last batch of the run may be short.

        Raises:
            DataExhausted: all epochs are over.
        """
        if not self._again:
            return self._draw()
        assert self._loader.batch_size is not None
        while len(self._again) < self._loader.batch_size:
            try:
                self._again += self._draw().positions
            except DataExhausted:
                break
        taken = self._again[: self._loader.batch_size]
        del self._again[: len(taken)]
        return PromptBatch(self._loader.prepare([position.row for position in taken]), taken)

    def acknowledge(self, positions: Iterable[PromptPosition]) -> None:
        """Mark prompts as trained on or dropped: a resumed run does not return them again.

        Args:
            positions: positions that `next_batch` returned; in any order, each once.

        Raises:
            ValueError: a prompt was never returned, or was acknowledged before.
        """
        for position in positions:
            if position not in self._outstanding:
                self._move_after(position)
            del self._outstanding[position]

    def attach(self, name: str, part: StoredPart) -> None:
        """Store and restore a part together with the position; only before the first step.

        Args:
            name: of its state in the checkpoint.
            part: replaces an earlier one of this name.
        """
        self._parts[name] = part

    def claim(self, positions: Iterable[PromptPosition]) -> None:
        """Skip prompts whose groups a part has restored; they stay unacknowledged until they are trained on.

        Raises:
            ValueError: a prompt was acknowledged or claimed before.
            DataExhausted: the data has no such prompt.
        """
        for position in positions:
            while position not in self._again:
                if position in self._outstanding or self.epoch > position.epoch:
                    raise ValueError(
                        f"Row {position.row} of epoch {position.epoch} was acknowledged or claimed before."
                    )
                self._again += self._draw().positions
            self._again.remove(position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, the loader's state, and the prompts before it that are not trained on.

        `outstanding` lists these prompts as `[epoch, row]`, `parts` holds the state of each attached part. Both are
        left out if empty.
        """
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        state = dict(self._position)
        if self._outstanding:
            state["outstanding"] = [list(position) for position in self._outstanding]
        if parts:
            state["parts"] = parts
        return state

    def check_position(self, state: dict[str, Any]) -> None:
        """Refuse a stored position in other data; change nothing.

        Raises:
            DataError: the position belongs to other data.
        """
        self._loader.check_position(state["loader"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position; only before the first batch."""
        self.epoch = state["epoch"]
        self._loader.load_state_dict(state["loader"])
        self._iterator = None
        self._position = self._drawn_to()
        self._untouched.clear()
        stored = [PromptPosition(*position) for position in state.get("outstanding", ())]
        self._outstanding = dict.fromkeys(p for p in stored if p.row < self._loader.num_rows)
        self._again = list(self._outstanding)
        parts = state.get("parts", {})
        for name in self._parts.keys() & parts.keys():
            self._parts[name].load_state_dict(parts[name])
        if self._again:
            logger.info("%d prompts that were drawn but not trained on come first.", len(self._again))

    def _draw(self) -> PromptBatch:
        """Take the next batch from the loader."""
        while self.epoch < self._max_epochs:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            rows = next(self._iterator, None)
            if rows is not None:
                positions = [PromptPosition(self.epoch, row) for row in self._loader.last_rows]
                self._untouched.append((self._drawn_to(), positions))
                return PromptBatch(rows, positions)
            self._iterator = None
            self.epoch += 1
        raise DataExhausted(f"the training data ended after {self.epoch} passes (max_num_epochs={self._max_epochs})")

    def _move_after(self, position: PromptPosition) -> None:
        """Move the stored point after the batch of a prompt; all prompts before it become outstanding."""
        if not any(position in drawn for _, drawn in self._untouched):
            raise ValueError(
                f"Row {position.row} of epoch {position.epoch} was acknowledged, but it was never drawn, or was "
                "acknowledged before. Acknowledge each prompt once."
            )
        while position not in self._outstanding:
            self._position, drawn = self._untouched.popleft()
            self._outstanding |= dict.fromkeys(drawn)

    def _drawn_to(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}


def training_stream(
    config: RolloutMasterConfig | SupervisedMasterConfig,
    rows: MixedDataset,
    batch_size: int,
    collate_fn: Callable[[list[Any]], BatchedDataDict[Any]] = rl_collate_fn,
) -> PromptStream:
    """Build the stream of the rows that a run trains on.

    Args:
        config: sets order, epochs, and the treatment of bad rows and of a position in changed data.
        rows: the training data.
        batch_size: rows of a batch.
        collate_fn: joins them.

    Raises:
        DataError: there are fewer rows than one batch.
    """
    loader = build_loader(
        rows,
        batch_size,
        shuffle=config.data.shuffle,
        seed=config.algorithm.seed,
        num_workers=config.data.num_workers,
        collate_fn=collate_fn,
        accept_changes=bool(config.checkpointing.allow_changed),
        max_bad_row_share=config.data.max_bad_row_share,
    )
    return PromptStream(loader, config.algorithm.max_num_epochs)
