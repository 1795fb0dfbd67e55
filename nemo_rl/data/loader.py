"""Load batches of prompts in an order that a resumed run repeats exactly.

The loader extends torchdata's `StatefulDataLoader`. Invariant: the order of epoch e depends only on the seed and e. The
state of the loader is therefore an epoch and a number of batches, and a loader with a restored state continues with the
next batch. If `take` has drawn a part of a batch, the state counts the batch as started.
"""

import gc
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.streams.row_faults import RowFaults
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """Row indices of one epoch, between two positions set by `begin`.

    Args:
        shuffle: Whether to draw a new order for each epoch. If False, the order is 0, 1, 2, ...
    """

    def __init__(self, num_rows: int, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self._known: tuple[int, list[int]] | None = None
        self.begin(epoch=0, position=0, end=num_rows)

    def begin(self, epoch: int, position: int, end: int) -> None:
        """Make the next `iter()` yield the rows of `epoch` from `position` to `end - 1`."""
        self._epoch = epoch
        self._position = position
        self._end = end

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self._epoch)[self._position : self._end])

    def order(self, epoch: int) -> list[int]:
        """Return the indices of all rows of an epoch, in its order."""
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._make_order(epoch)
        return self._known[1]

    def _make_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data_order", epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


class PromptLoader(StatefulDataLoader):
    """A `StatefulDataLoader` whose state is an epoch and a number of batches.

    Each `iter()` begins the next epoch, except the first `iter()` after `load_state_dict`, which yields the rest of the
    saved epoch (nothing, if it was saved after the last batch). Unlike the state of torchdata's class, this state does
    not depend on the number of workers or on calls of `iter()`. Rows that are too long or cannot be used are reported
    by file and line.

    Args:
        sampler: Sampler that determines the order of the rows.
        accept_changes: Whether to load positions that belong to other data, batch sizes or orders.
        max_bad_row_share: Largest share of unusable rows in an epoch.
        **kwargs: Arguments of `StatefulDataLoader`.
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
        self.epoch = 0
        """Number of finished epochs."""
        self.last_rows: list[int] = []
        """Indices of the rows in the last yielded batch."""
        self._accept_changes = accept_changes
        self._order = sampler
        self._faults = RowFaults(dataset, sampler.num_rows, max_bad_row_share)
        self._num_rows_done = 0
        self._in_progress = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the remaining batches of a restored epoch."""
        if self._in_progress:
            self._begin_epoch(self.epoch + 1)
        self._in_progress = True
        self._order.begin(self.epoch, self._num_rows_done, self._epoch_end)
        for batch in super().__iter__():
            self.last_rows = self._next_rows(self._size)
            self._num_rows_done += len(self.last_rows)
            self._faults.note(batch)
            yield batch
        self._in_progress = False
        if self._num_rows_done == self._epoch_end:
            self._finish_epoch()

    @property
    def num_over_long(self) -> int:
        """Return the number of prompts so far that were too long."""
        return self._faults.num_over_long

    @property
    def num_unusable(self) -> int:
        """Return the number of rows so far that could not be rendered or encoded."""
        return self._faults.num_unusable

    @property
    def num_rows(self) -> int:
        """Return the number of rows of an epoch, including rows that do not fill its last batch."""
        return self._order.num_rows

    @property
    def current_batch(self) -> list[int]:
        """Return the indices of the rows in the last batch that was started in this epoch."""
        end = self._num_batches_done * self._size
        return self._order.order(self.epoch)[end - self._size : end]

    def take(self, num_rows: int) -> list[int]:
        """Draw up to `num_rows` rows without preparing them. The next `iter()` continues after them.

        Returns:
            Indices of rows of this epoch, or an empty list if it has no more. The next call then begins the next epoch.
        """
        rows = self._next_rows(num_rows)
        self._num_rows_done += len(rows)
        self._in_progress = False
        if not rows:
            self._finish_epoch()
        return rows

    def prepare(self, rows: Sequence[int], counted: Collection[int] = ()) -> Any:
        """Make a batch of rows that `take` has drawn, in this process and without changing the position.

        Args:
            rows: Indices of rows of the data set.
            counted: Indices of rows that an earlier process has already reported if they cannot be used.
        """
        assert self.collate_fn is not None
        batch = self.collate_fn([self.dataset[row] for row in rows])
        self._faults.note(batch, counted)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of started batches, and the settings on which their meaning depends."""
        return {
            "epoch": self.epoch,
            "num_batches_done": self._num_batches_done,
            **self._conditions(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next `iter()` continue after the finished batches.

        With `accept_changes`, a position in other data is converted to the same epoch and the same number of rows,
        rounded down to complete batches.

        Raises:
            DataError: The state belongs to other data, another seed, batch size or `shuffle`.
        """
        changed = self.check_position(state_dict)
        self._begin_epoch(state_dict["epoch"])
        self._num_rows_done = min(state_dict["num_batches_done"] * state_dict["batch_size"], self._epoch_end)
        self._in_progress = False
        if changed:
            self._move(changed)

    def check_position(self, state_dict: dict[str, Any]) -> list[str]:
        """Return the changes since a position was saved. Errors are those of `load_state_dict`."""
        if "data_sets" in state_dict:
            raise DataError(
                "the checkpoint's position is in data sets that are drawn by weights; this run shuffles them together. "
                "Set the same data.train.<i>.weight or data.curriculum, or start a new run in another checkpoint_dir."
            )
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

    @property
    def _size(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    @property
    def _epoch_end(self) -> int:
        """Number of rows of an epoch that are used."""
        return min(len(self) * self._size, self._order.num_rows)

    @property
    def _num_batches_done(self) -> int:
        """Number of batches that were started in this epoch."""
        return math.ceil(self._num_rows_done / self._size)

    def _next_rows(self, num_rows: int) -> list[int]:
        """Return the indices of up to `num_rows` next rows of this epoch."""
        start = self._num_rows_done
        return self._order.order(self.epoch)[start : min(start + num_rows, self._epoch_end)]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._num_rows_done = epoch, 0
        self._faults.begin_epoch()

    def _finish_epoch(self) -> None:
        """Report the rows of this epoch that were not used for training, and go to the start of the next epoch."""
        self._faults.report()
        self._begin_epoch(self.epoch + 1)

    def _move(self, changed: list[str]) -> None:
        """Round the position in changed data down to complete batches."""
        if self._num_rows_done < self._epoch_end:
            self._num_rows_done -= self._num_rows_done % self._size
        logger.warning(
            "Data changed (%s): epoch %d resumes after %d of its %d rows. %s",
            ", ".join(changed),
            self.epoch + 1,
            self._num_rows_done,
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
    """Build the loader of a data set.

    Each pass over the loader is one epoch. A `state_dict()` can be taken between two batches, and before or after an
    epoch. A new loader with the same arguments that loads this state continues with the next batch. Only the number of
    workers may differ.

    Args:
        dataset: Data with `len()`, `[i]` and `place(i)`.
        shuffle: Whether each epoch has a new order.
        num_workers: Number of processes that prepare prompts, or 0 for this process.
        drop_last: Whether to leave out the rows of an epoch that do not fill a batch.
        max_rows: Number of first rows of the data set to use, or None for all rows.
        accept_changes: Whether to continue from a position in other data (`PromptLoader.load_state_dict`).
        max_bad_row_share: Largest share of unusable rows in an epoch. Above it, iterating raises `DataError`.

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
    """Detach a forked data worker from the state that it inherited from the run.

    The worker ignores Ctrl-C and a closed terminal, because the run ends it. Garbage collection must not clean up the
    run's objects, such as Ray's, because this would wait for threads that exist only in the run's process.
    """
    os.setpgid(0, 0)
    gc.freeze()
