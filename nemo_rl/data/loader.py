"""Batches of prompts in an order that a resumed run repeats exactly.

Wraps torchdata's `StatefulDataLoader`; iterated by the algorithms' session.
Law: the order of epoch e is a function of (seed, e) alone, so the state of the loader is an epoch
and a position, and a loader that loads a state goes on with the very next batch.
"""

import logging
from collections.abc import Callable, Iterator, Sized
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
    """Row indices of one epoch after another; each `iter()` begins the next epoch.

    Args:
        num_rows: Rows of the data set.
        shuffle: Draw a new order for each epoch; otherwise 0, 1, 2, ...
        seed: Of the orders.
    """

    def __init__(self, num_rows: int, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self.next_epoch = 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> "EpochOrder":
        order = EpochOrder(self, self.next_epoch)
        self.next_epoch += 1
        return order

    def order(self, epoch: int) -> list[int]:
        """The rows of an epoch."""
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data_order", epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


class EpochOrder(Iterator[int]):
    """Position within one epoch; its state is saved and restored by the loader."""

    def __init__(self, sampler: EpochSampler, epoch: int) -> None:
        self._sampler = sampler
        self._begin(epoch, position=0)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._rows = self._sampler.order(epoch)
        self._position = position

    def __next__(self) -> int:
        if self._position >= len(self._rows):
            raise StopIteration
        self._position += 1
        return self._rows[self._position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, with what they depend on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self._sampler.num_rows,
            "shuffle": self._sampler.shuffle,
            "seed": self._sampler.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved position.

        Raises:
            DataError: The state belongs to other data, another seed or the other `shuffle`.
        """
        now = self.state_dict()
        changed = [k for k in ("num_rows", "shuffle", "seed") if state[k] != now[k]]
        if changed:
            raise DataError(
                "the saved data position does not fit this run: "
                + ", ".join(f"{k} was {state[k]} and is {now[k]}" for k in changed)
                + ". Resume with the same data and keys, or start a new run in another "
                "checkpoint_dir."
            )
        self._begin(state["epoch"], state["position"])
        self._sampler.next_epoch = state["epoch"] + 1


class PromptLoader(StatefulDataLoader):
    """`StatefulDataLoader` that reports prompts that are too long, by file and line.

    Attributes:
        num_over_long: Too long prompts met so far in this process.
    """

    def __init__(self, dataset: Dataset[Any], **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.num_over_long = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches of the next epoch, or of the rest of a restored one."""
        before = self.num_over_long
        for batch in super().__iter__():
            self._note_over_long(batch)
            yield batch
        if self.num_over_long > before:
            logger.warning(
                "%d prompts of this epoch were longer than data.max_input_seq_length; they were "
                "generated from a stub and did not train the model.",
                self.num_over_long - before,
            )

    def _note_over_long(self, batch: Any) -> None:
        if "loss_multiplier" not in batch:
            return
        for idx, multiplier in zip(batch["idx"], batch["loss_multiplier"].tolist(), strict=True):
            if multiplier:
                continue
            self.num_over_long += 1
            if self.num_over_long <= PLACES_SHOWN:
                file, line = self.dataset.place(idx)
                logger.warning(
                    "%s:%s: prompt longer than data.max_input_seq_length; kept with loss_multiplier 0.",
                    file,
                    line,
                )


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
    drop_last: bool = True,
    collate_fn: Callable[[list[Any]], Any] = rl_collate_fn,
) -> PromptLoader:
    """Make the loader of a data set.

    Each pass over the loader is one epoch. `state_dict()` between two batches, at an epoch's end or
    before its start, loaded into a fresh loader of the same arguments, goes on with the next batch;
    the number of workers may differ.

    Args:
        dataset: Data with `len()`, `[i]` and `place(i)`.
        batch_size: Prompts in a batch.
        shuffle: A new order each epoch.
        seed: Of the orders.
        num_workers: Processes that prepare prompts; 0 is this one.
        drop_last: Leave out the rows of an epoch that do not fill a batch.
        collate_fn: Joins data into a batch.

    Raises:
        DataError: An epoch would have no batch.
    """
    assert isinstance(dataset, Sized)
    if batch_size < 1 or (drop_last and len(dataset) < batch_size) or not len(dataset):
        raise DataError(
            f"the data set has {len(dataset)} rows, fewer than one batch of {batch_size} prompts. "
            "Use more rows, or lower the number of prompts per step."
        )
    return PromptLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochSampler(len(dataset), shuffle, seed),
        num_workers=num_workers,
        drop_last=drop_last,
        collate_fn=collate_fn,
    )
