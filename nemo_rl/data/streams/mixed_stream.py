"""Stream batches of prompts for training, either from all rows shuffled together or from data sets by their shares.

Each data set of a mixture has its own share, order and epochs. Batches are divided by the shares without random
numbers.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from nemo_rl.config import RolloutMasterConfig, SupervisedMasterConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.loader import EpochSampler, build_loader
from nemo_rl.data.streams.curriculum import Curriculum
from nemo_rl.data.streams.prompt_stream import (
    DataExhausted,
    GroupRewards,
    PromptBatch,
    PromptPosition,
    Prompts,
    PromptStream,
    StoredPart,
    StoredParts,
    unfinished_state,
)
from nemo_rl.data.streams.row_faults import RowFaults
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

_ROUNDING = 1e-9
"""Differences below this number are treated as rounding errors of floats."""


class Division:
    """Divide batches among data sets, and keep the fraction of a prompt that each data set has not received.

    Each data set gets the integer part of its share of a batch. The remaining prompts go to the data sets that would
    otherwise be the first to lack a whole prompt. This is the rule of the earliest deadline, as for periodic tasks on
    several processors (Baruah et al., "Proportionate progress", 1996).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._owed = dict.fromkeys(names, 0.0)

    def next_counts(self, size: int, shares: Mapping[str, float]) -> dict[str, int]:
        """Return the number of prompts of the next batch that come from each data set.

        Args:
            size: number of prompts of the batch.
            shares: share of each data set. The shares sum to 1.
        """
        parts = {name: size * share for name, share in shares.items()}
        counts = {name: math.floor(part + _ROUNDING) for name, part in parts.items()}
        rates = {name: max(0.0, parts[name] - counts[name]) for name in parts}
        owed = {name: self._owed[name] + rates[name] for name in parts}
        candidates = [name for name, rate in rates.items() if rate > _ROUNDING]
        candidates.sort(key=lambda name: (owed[name] <= _ROUNDING, (1 - owed[name]) / rates[name]))
        for name in candidates[: size - sum(counts.values())]:
            counts[name] += 1
            owed[name] -= 1
        self._owed = owed
        return counts

    def state_dict(self) -> dict[str, float]:
        """Return the fraction of a prompt that each data set has not received."""
        return dict(self._owed)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state. Data sets that are not in the state start with a fraction of 0."""
        self._owed = {name: state.get(name, 0.0) for name in self._owed}


def evenly_spread(counts: Mapping[str, int]) -> list[str]:
    """Return each name as often as its count says. The occurrences of each name are spread over the list."""
    places = [((index + 0.5) / count, name) for name, count in counts.items() for index in range(count)]
    return [name for _, name in sorted(places, key=lambda place: place[0])]


class DataSetRows:
    """Draw the rows of a data set, each row once per epoch.

    Invariant: the order of an epoch depends on the run's seed, the name and the epoch, and not on other data sets.

    Args:
        rows: indices of the data set's rows among the rows of all data sets.
        shuffle: whether each epoch has a new order.
    """

    def __init__(self, name: str, rows: range, shuffle: bool, seed: int) -> None:
        self.rows = rows
        self._sampler = EpochSampler(len(rows), shuffle, derive_seed(seed, "data_set", name))
        self._epoch = self._num_done = 0

    @property
    def epochs(self) -> float:
        """Return the number of passes over the rows so far, including the finished fraction of the current one."""
        return self._epoch + self._num_done / len(self.rows)

    def draw(self) -> PromptPosition:
        """Return the position of the next row. Its epoch is that of this data set."""
        row = self.rows[self._sampler.order(self._epoch)[self._num_done]]
        position = PromptPosition(self._epoch, row)
        self._num_done += 1
        if self._num_done == len(self.rows):
            self._epoch, self._num_done = self._epoch + 1, 0
        return position

    def state_dict(self) -> dict[str, int]:
        """Return the number of finished epochs, the rows drawn in the current epoch, and the rows per epoch."""
        return {"epoch": self._epoch, "num_done": self._num_done, "num_rows": len(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows of a state. If the data set has too few rows, continue with the next epoch."""
        self._epoch, self._num_done = state["epoch"], state["num_done"]
        if self._num_done >= len(self.rows):
            self._epoch, self._num_done = self._epoch + 1, 0


logger = logging.getLogger(__name__)


class MixedPromptStream:
    """Batches of several data sets by their shares (`prompt_stream.Prompts`), for one thread.

    An epoch of the stream has as many prompts as all data sets have rows, rounded down to complete batches. Prompts are
    prepared in this process when they are returned, because the shares of later batches are not known earlier.

    Args:
        dataset: the rows of all data sets, with their names.
        shuffle: whether each epoch of a data set has a new order.
        max_epochs: number of epochs after which the stream ends.
        collate_fn: function that joins data into a batch.
        max_bad_row_share: largest share of unusable rows in an epoch.
        accept_changes: whether to load positions that belong to other data, batch sizes or orders.

    Raises:
        DataError: there are fewer rows than one batch.
    """

    def __init__(
        self,
        dataset: MixedDataset,
        batch_size: int,
        curriculum: Curriculum,
        *,
        shuffle: bool,
        seed: int,
        max_epochs: int,
        collate_fn: Callable[[list[Any]], BatchedDataDict[Any]],
        max_bad_row_share: float = 1.0,
        accept_changes: bool = False,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._curriculum = curriculum
        self._settings = {"batch_size": batch_size, "shuffled": shuffle, "seed": seed}
        self._max_epochs = max_epochs
        self._collate_fn = collate_fn
        self._accept_changes = accept_changes
        self.batches_per_epoch = len(dataset) // batch_size
        """Number of batches in one epoch of the stream."""
        if not self.batches_per_epoch:
            raise DataError(
                f"the data sets have {len(dataset)} rows together, fewer than one batch of {batch_size} prompts. "
                "Use more rows, or lower the number of prompts per step."
            )
        ranges = dataset.rows_by_name
        self._data_sets = {name: DataSetRows(name, rows, shuffle, seed) for name, rows in ranges.items()}
        self._division = Division(list(self._data_sets))
        self._faults = RowFaults(dataset, len(dataset), max_bad_row_share)
        self._num_batches = 0
        """Number of batches that were drawn."""
        self._outstanding: dict[PromptPosition, None] = {}
        """Prompts that were drawn but not acknowledged, in the order in which they were drawn."""
        self._waiting: dict[PromptPosition, None] = {}
        """Outstanding prompts that were not yet returned."""
        self._restored: frozenset[PromptPosition] = frozenset()
        """Prompts that an earlier process drew. That process has already reported their faults."""
        self._parts = StoredParts()

    @property
    def epoch(self) -> int:
        """Number of finished epochs of the stream."""
        return self._num_batches // self.batches_per_epoch

    def next_batch(self) -> PromptBatch:
        """Draw the next batch of prompts (`Prompts.next_batch`)."""
        while len(self._waiting) < self._batch_size and self.epoch < self._max_epochs:
            self._draw()
        if not self._waiting:
            raise DataExhausted(
                f"the training data ended after {self.epoch} epochs (max_num_epochs={self._max_epochs})"
            )
        taken = list(islice(self._waiting, self._batch_size))
        for position in taken:
            del self._waiting[position]
        return self._prepared(taken, counted={position.row for position in taken if position in self._restored})

    def acknowledge(self, positions: Iterable[PromptPosition]) -> None:
        """Mark prompts as trained on or dropped (`Prompts.acknowledge`)."""
        for position in positions:
            if position not in self._outstanding or position in self._waiting:
                raise ValueError(
                    f"Row {position.row} of epoch {position.epoch} was acknowledged, but it was never handed out, or "
                    "was acknowledged before. Acknowledge each prompt once."
                )
            del self._outstanding[position]

    def finish_step(self, step: int, rewards: GroupRewards) -> None:
        """Note that a step was trained on (`Prompts.finish_step`)."""
        self._curriculum.finish_step(step, [(self._name(position), each) for position, each in rewards.items()])

    def metrics(self, rewards: GroupRewards) -> dict[str, float]:
        """Return the metrics of the stream (`Prompts.metrics`).

        Each data set has `share/<name>` (of the step's prompts), `target_share/<name>` (before the step, by the rule),
        `epochs/<name>` (passes over its rows) and `recent_accuracy/<name>` (the moving average before the step). If the
        step has rewards of it, it also has `accuracy/<name>` (share of solved samples) and `reward/<name>` (mean).
        """
        prompts: dict[str, int] = dict.fromkeys(self._data_sets, 0)
        samples: dict[str, list[float]] = defaultdict(list)
        for position, of_group in rewards.items():
            prompts[self._name(position)] += 1
            samples[self._name(position)] += of_group
        found = {f"share/{name}": count / max(len(rewards), 1) for name, count in prompts.items()}
        for name, each in samples.items():
            if each:
                found |= {f"accuracy/{name}": self._curriculum.accuracy(each), f"reward/{name}": sum(each) / len(each)}
        epochs = {f"epochs/{name}": data_set.epochs for name, data_set in self._data_sets.items()}
        return found | epochs | self._curriculum.metrics()

    def attach(self, name: str, part: StoredPart) -> None:
        """Store and restore a part together with the position (`Prompts.attach`)."""
        self._parts.attach(name, part)

    def claim(self, positions: Iterable[PromptPosition]) -> None:
        """Skip prompts whose groups a part has restored (`Prompts.claim`)."""
        for position in positions:
            if position not in self._waiting:
                raise DataError(
                    f"Row {position.row} of epoch {position.epoch} was claimed, but the checkpoint has not drawn it. "
                    "If the data changed, resume with the same data and keys, or start a new run in another "
                    "checkpoint_dir."
                )
            del self._waiting[position]

    def prepare(self, positions: Sequence[PromptPosition]) -> PromptBatch:
        """Prepare claimed prompts again (`Prompts.prepare`)."""
        return self._prepared(positions, counted={position.row for position in positions})

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the states of the data sets, of the division and of the curriculum.

        See `unfinished_state` for the part about prompts that were drawn but not trained on.
        """
        loader = {
            **self._settings,
            "num_rows": len(self._dataset),
            "num_batches": self._num_batches,
            "data_sets": {name: data_set.state_dict() for name, data_set in self._data_sets.items()},
            "owed": self._division.state_dict(),
        }
        state = {"epoch": self.epoch, "loader": loader, "curriculum": self._curriculum.state_dict()}
        return state | unfinished_state(self._outstanding, self._parts)

    def check_position(self, state: dict[str, Any]) -> None:
        """Check that a stored position fits the data (`Prompts.check_position`)."""
        self._changes(state["loader"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a stored position (`Prompts.load_state_dict`).

        With `accept_changes`, each data set continues after the rows that the data set with the same name has provided.
        A new data set begins with its first epoch.
        """
        loader = state["loader"]
        changes = self._changes(loader)
        for name in self._data_sets.keys() & loader["data_sets"].keys():
            self._data_sets[name].load_state_dict(loader["data_sets"][name])
        self._division.load_state_dict(loader["owed"])
        self._curriculum.load_state_dict(state["curriculum"])
        self._num_batches = loader["num_batches"]
        stored = [PromptPosition(*position) for position in state.get("outstanding", ())]
        self._outstanding = dict.fromkeys(self._moved(stored, loader["data_sets"]) if changes else stored)
        self._waiting = dict(self._outstanding)
        self._restored = frozenset(self._outstanding)
        self._faults.begin_epoch()
        if changes:
            logger.warning("Data changed (%s): each data set continues after the rows it gave.", ", ".join(changes))
        self._parts.load_state_dict(state.get("parts", {}))
        if self._waiting:
            logger.info("%d prompts that were drawn but not trained on come first.", len(self._waiting))

    def _draw(self) -> None:
        """Draw a batch. Before the first batch of an epoch, report the rows of the last epoch that were not used."""
        if self._num_batches % self.batches_per_epoch == 0:
            self._faults.report()
            self._faults.begin_epoch()
        counts = self._division.next_counts(self._batch_size, self._curriculum.shares())
        drawn = dict.fromkeys(self._data_sets[name].draw() for name in evenly_spread(counts))
        self._outstanding |= drawn
        self._waiting |= drawn
        self._num_batches += 1

    def _prepared(self, positions: Sequence[PromptPosition], counted: set[int]) -> PromptBatch:
        rows = self._collate_fn([self._dataset[position.row] for position in positions])
        self._faults.note(rows, counted)
        return PromptBatch(rows, list(positions))

    def _name(self, position: PromptPosition) -> str:
        return str(self._dataset.name_of(position.row))

    def _changes(self, loader: Mapping[str, Any]) -> list[str]:
        """Return the changes since a position was saved, and refuse unacceptable ones."""
        if "data_sets" not in loader:
            raise DataError(
                "the checkpoint's position is in data sets that are shuffled together; this run draws them by weights. "
                "Leave weights and data.curriculum out, or start a new run in another checkpoint_dir."
            )
        sizes = {name: data_set["num_rows"] for name, data_set in loader["data_sets"].items()}
        now = {**self._settings, "rows by data set": {name: len(each.rows) for name, each in self._data_sets.items()}}
        before = {**loader, "rows by data set": sizes}
        changed = [f"{key} was {before.get(key)} and is {value}" for key, value in now.items() if before[key] != value]
        if changed and not self._accept_changes:
            raise DataError(
                f"the saved data position does not fit this run: {', '.join(changed)}. Resume "
                "with the same data and keys, or start a new run in another checkpoint_dir."
            )
        return changed

    def _moved(
        self, positions: Iterable[PromptPosition], stored: Mapping[str, Mapping[str, int]]
    ) -> Iterable[PromptPosition]:
        """Yield the positions of stored prompts in the data sets of this run, without prompts that no longer exist."""
        starts, start = {}, 0
        for name, data_set in stored.items():
            starts[name] = range(start, start := start + data_set["num_rows"])
        for position in positions:
            name = next(name for name, rows in starts.items() if position.row in rows)
            index = position.row - starts[name].start
            if name in self._data_sets and index < len(self._data_sets[name].rows):
                yield PromptPosition(position.epoch, self._data_sets[name].rows[index])


type Collate = Callable[[list[Any]], BatchedDataDict[Any]]


def training_stream(
    config: RolloutMasterConfig | SupervisedMasterConfig,
    rows: MixedDataset,
    batch_size: int,
    collate_fn: Collate = rl_collate_fn,
) -> Prompts:
    """Build the stream of a run's training rows.

    Args:
        config: configuration of order, shares and epochs, and of the treatment of bad rows and changed data.
        collate_fn: function that joins data into a batch.

    Raises:
        DataError: there are fewer rows than one batch.
    """
    data, max_epochs = config.data, config.algorithm.max_num_epochs
    accept_changes = bool(config.checkpointing.allow_changed)
    if data.has_shares:
        weights = [1.0 if entry.weight is None else entry.weight for entry in data.train_entries]
        return MixedPromptStream(
            rows,
            batch_size,
            Curriculum(dict(zip(data.train_names, weights, strict=True)), data.curriculum),
            shuffle=data.shuffle,
            seed=config.algorithm.seed,
            max_epochs=max_epochs,
            collate_fn=collate_fn,
            max_bad_row_share=data.max_bad_row_share,
            accept_changes=accept_changes,
        )
    loader = build_loader(
        rows,
        batch_size,
        shuffle=data.shuffle,
        seed=config.algorithm.seed,
        num_workers=data.num_workers,
        collate_fn=collate_fn,
        accept_changes=accept_changes,
        max_bad_row_share=data.max_bad_row_share,
    )
    return PromptStream(loader, max_epochs)
