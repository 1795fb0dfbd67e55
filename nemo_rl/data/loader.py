"""Loads batches of prompts in an order that a resumed run repeats exactly.

Wraps torchdata's `StatefulDataLoader`. Invariant: the order of epoch e is a function of (seed, e) alone, so the state
of the loader is an epoch and a number of batches, and a loader with a restored state continues with the next batch.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_rl.data.bad_rows import PLACES_SHOWN
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """Row indices of one epoch, beginning at a position; `begin` sets epoch and position.

    Args:
        num_rows: Rows of the data set.
        shuffle: Draw a new order for each epoch; otherwise 0, 1, 2, ...
        seed: Seed of the orders.
    """

    def __init__(self, num_rows: int, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self.begin(epoch=0, position=0)

    def begin(self, epoch: int, position: int) -> None:
        """Make the next `iter()` yield the rows of `epoch`, beginning at `position`."""
        self._epoch = epoch
        self._position = position

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self._epoch)[self._position :])

    def order(self, epoch: int) -> list[int]:
        """Return all rows of an epoch, in its order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data_order", epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


class PromptLoader(StatefulDataLoader):
    """A `StatefulDataLoader` whose state is an epoch and a number of batches.

    Each `iter()` begins the next epoch, except the first one after `load_state_dict`, which yields
    the rest of the saved epoch (nothing, if it was saved after the last batch). torchdata's own
    state depends on the number of workers and counts epochs by calls of `iter()`; this one does
    neither. Rows that are too long or cannot be used are reported by file and line.

    Args:
        dataset: The rows.
        sampler: Their order.
        accept_changes: Also load positions that belong to other data, batch sizes or orders.
        max_bad_row_share: Share of rows that one epoch may find unusable.
        **kwargs: For `StatefulDataLoader`.

    Attributes:
        num_over_long: Number of too long prompts so far.
        num_unusable: Number of rows so far that could not be rendered or encoded.
        last_rows: Rows of the data set that are in the batch yielded last.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: EpochSampler,
        *,
        accept_changes: bool = False,
        max_bad_row_share: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, sampler=sampler, **kwargs)
        self.num_over_long = 0
        self.num_unusable = 0
        self.last_rows: list[int] = []
        self._accept_changes = accept_changes
        self._max_bad_row_share = max_bad_row_share
        self._order = sampler
        self._epoch = 0
        self._num_batches_done = 0
        self._in_progress = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or of the rest of a restored one."""
        if self._in_progress:
            self._epoch, self._num_batches_done = self._epoch + 1, 0
        self._in_progress = True
        assert self.batch_size is not None
        self._order.begin(self._epoch, self._num_batches_done * self.batch_size)
        before, unusable_before = self.num_over_long, self.num_unusable
        order = self._order.order(self._epoch)
        for batch in super().__iter__():
            start = self._num_batches_done * self.batch_size
            self.last_rows = order[start : start + self.batch_size]
            self._num_batches_done += 1
            self._note_weightless(batch)
            self._check_share(self.num_unusable - unusable_before)
            yield batch
        self._epoch, self._num_batches_done = self._epoch + 1, 0
        self._in_progress = False
        if self.num_over_long > before:
            logger.warning(
                "%d rows of this epoch were longer than data.max_input_seq_length; they were "
                "cut to a stub and did not train the model.",
                self.num_over_long - before,
            )
        if self.num_unusable > unusable_before:
            logger.warning("%d rows of this epoch could not be used.", self.num_unusable - unusable_before)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, those that do not fill its last batch included."""
        return self._order.num_rows

    def prepare(self, rows: Sequence[int]) -> Any:
        """Make a batch of rows that were drawn and counted before, in this process; the position stays where it is."""
        assert self.collate_fn is not None
        batch = self.collate_fn([self.dataset[row] for row in rows])
        batch.pop("fault", None)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, its finished batches, and the settings that give them a meaning."""
        return {
            "epoch": self._epoch,
            "num_batches_done": self._num_batches_done,
            **self._conditions(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next `iter()` continue after the finished batches.

        With `accept_changes`, a position in other data becomes the same epoch and the same number of rows, rounded down
        to whole batches.

        Raises:
            DataError: The state belongs to other data, another seed, batch size or `shuffle`.
        """
        changed = self.check_position(state_dict)
        self._epoch = state_dict["epoch"]
        self._num_batches_done = state_dict["num_batches_done"]
        self._in_progress = False
        if changed:
            self._move(state_dict, changed)

    def check_position(self, state_dict: dict[str, Any]) -> list[str]:
        """Return what has changed since a position was saved; errors as in `load_state_dict`."""
        changed = [
            f"{key} was {state_dict.get(key)} and is {now}"
            for key, now in self._conditions().items()
            if state_dict.get(key) != now
        ]
        if changed and not self._accept_changes:
            raise DataError(
                f"the saved data position does not fit this run: {', '.join(changed)}. Resume "
                "with the same data and keys, or start a new run in another checkpoint_dir."
            )
        return changed

    def _move(self, state_dict: dict[str, Any], changed: list[str]) -> None:
        """Move to the same number of rows in changed data."""
        assert self.batch_size is not None
        rows_done = state_dict["num_batches_done"] * state_dict["batch_size"]
        self._num_batches_done = min(rows_done // self.batch_size, len(self))
        logger.warning(
            "Data changed (%s): epoch %d resumes after %d of its %d rows. %s",
            ", ".join(changed),
            self._epoch + 1,
            self._num_batches_done * self.batch_size,
            self._order.num_rows,
            "The rows have a new order, so the rest of this epoch repeats some rows and skips others; every later "
            "epoch has each row once."
            if self._order.shuffle
            else "Each row that was added or removed before this position shifts it by one row.",
        )

    def _conditions(self) -> dict[str, Any]:
        order = self._order
        return {
            "num_rows": order.num_rows,
            "batch_size": self.batch_size,
            "shuffle": order.shuffle,
            "seed": order.seed,
        }

    def _note_weightless(self, batch: Any) -> None:
        """Report the rows of a batch that do not train, and remove their faults from the batch."""
        if "loss_multiplier" not in batch:
            return
        multipliers = dict(zip(batch["idx"], batch["loss_multiplier"].tolist(), strict=True))
        faults = dict(zip(batch["idx"], batch.pop("fault", ()), strict=False))
        for idx, multiplier in multipliers.items():
            if multiplier:
                continue
            fault = faults.get(idx)
            self.num_over_long += fault is None
            self.num_unusable += fault is not None
            if (self.num_over_long if fault is None else self.num_unusable) <= PLACES_SHOWN:
                file, line = self.dataset.place(idx)
                reason = fault or "longer than data.max_input_seq_length"
                logger.warning("%s:%s: %s; kept with loss_multiplier 0.", file, line, reason)

    def _check_share(self, num_unusable: int) -> None:
        num_rows = self._order.num_rows
        if num_unusable > self._max_bad_row_share * num_rows:
            raise DataError(
                f"{num_unusable} of {num_rows} training rows could not be used, more than "
                f"data.max_bad_row_share={self._max_bad_row_share:g} allows; the log names the first ones. "
                "Fix them, or raise that key to train on the rest."
            )


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
    drop_last: bool = True,
    max_rows: int | None = None,
    collate_fn: Callable[[list[Any]], Any] = rl_collate_fn,
    accept_changes: bool = False,
    max_bad_row_share: float = 1.0,
) -> PromptLoader:
    """Make the loader of a data set.

    Each pass over the loader is one epoch. A new loader with the same arguments that loads a `state_dict()`, taken
    between two batches, at an epoch's end or before its start, continues with the next batch; the number of workers
    may differ.

    Args:
        dataset: Data with `len()`, `[i]` and `place(i)`.
        batch_size: Prompts in a batch.
        shuffle: A new order each epoch.
        seed: Seed of the orders.
        num_workers: Processes that prepare prompts; 0 is this one.
        drop_last: Leave out the rows of an epoch that do not fill a batch.
        max_rows: Only the first rows of the data set; None: all.
        collate_fn: Joins data into a batch.
        accept_changes: Also continue from a position in other data, see `PromptLoader.load_state_dict`.
        max_bad_row_share: Share of rows that one epoch may find unusable; above it iterating raises `DataError`.

    Raises:
        DataError: An epoch would have no batch.
    """
    assert isinstance(dataset, Sized)
    num_rows = len(dataset) if max_rows is None else min(max_rows, len(dataset))
    if batch_size < 1 or (drop_last and num_rows < batch_size) or not num_rows:
        raise DataError(
            f"the data set has {num_rows} rows, fewer than one batch of {batch_size} prompts. "
            "Use more rows, or lower the number of prompts per step."
        )
    return PromptLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochSampler(num_rows, shuffle, seed),
        max_bad_row_share=max_bad_row_share,
        num_workers=num_workers,
        worker_init_fn=_begin_worker,
        drop_last=drop_last,
        collate_fn=collate_fn,
        accept_changes=accept_changes,
    )


def _begin_worker(worker_id: int) -> None:
    """Detach a forked data worker from the state that it shares with the run.

    The worker ignores Ctrl-C and a closed terminal, because the run ends it. Garbage collection must not touch objects
    of the run (Ray's among them), because their clean-up waits for threads that exist only in the run's process.
    """
    os.setpgid(0, 0)
    gc.freeze()
