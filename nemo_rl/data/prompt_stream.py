"""An endless-looking stream of prompt batches over the epochs of a loader, with a position to save.

Invariant: the position to save is behind the last batch that was trained on, however far batches have been drawn; a
fresh stream that loads it goes on with the batch after that one.
"""

from collections.abc import Callable
from typing import Any

from nemo_rl.config import RolloutMasterConfig, SupervisedMasterConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.loader import PromptLoader, build_loader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class DataExhausted(Exception):  # noqa: N818
    """The training data has no further batch, or none that teaches; ends the run in an orderly way."""


class PromptStream:
    """Batches of prompts, epoch after epoch.

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

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass."""
        return len(self._loader)

    def next_batch(self) -> BatchedDataDict[Any]:
        """The next batch.

        Raises:
            DataExhausted: all epochs are over.
        """
        while self.epoch < self._max_epochs:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
            self._iterator = None
            self.epoch += 1
        raise DataExhausted(f"the training data ended after {self.epoch} passes (max_num_epochs={self._max_epochs})")

    def trained(self) -> None:
        """All batches drawn so far were trained on: the position to save moves behind them."""
        self._position = self._drawn_to()

    def state_dict(self) -> dict[str, Any]:
        """The position: epoch and the loader's own state."""
        return self._position

    def check_position(self, state: dict[str, Any]) -> None:
        """Refuse a stored position that is one in other data; moves nothing.

        Raises:
            DataError: it is.
        """
        self._loader.check_position(state["loader"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position; only before the first batch. Keys beside it belong to a source."""
        self.epoch = state["epoch"]
        self._loader.load_state_dict(state["loader"])
        self._iterator = None
        self._position = self._drawn_to()

    def _drawn_to(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}


def training_stream(
    config: RolloutMasterConfig | SupervisedMasterConfig,
    rows: MixedDataset,
    batch_size: int,
    collate_fn: Callable[[list[Any]], BatchedDataDict[Any]] = rl_collate_fn,
) -> PromptStream:
    """The rows that a run trains on.

    Args:
        config: says order, epochs, and what is made of bad rows and of a position in changed data.
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
