"""Builds the stream of the rows that a run trains on: all rows shuffled together, or data sets by their shares."""

from collections.abc import Callable
from typing import Any

from nemo_rl.config import RolloutMasterConfig, SupervisedMasterConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.loader import build_loader
from nemo_rl.data.mixing.curriculum import Curriculum
from nemo_rl.data.mixing.mixed_stream import MixedPromptStream
from nemo_rl.data.streams.prompt_stream import Prompts, PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

type Collate = Callable[[list[Any]], BatchedDataDict[Any]]


def training_stream(
    config: RolloutMasterConfig | SupervisedMasterConfig,
    rows: MixedDataset,
    batch_size: int,
    collate_fn: Collate = rl_collate_fn,
) -> Prompts:
    """Build the stream of the rows that a run trains on.

    Args:
        config: sets order, shares, epochs, and the treatment of bad rows and of a position in changed data.
        rows: the training data.
        batch_size: rows of a batch.
        collate_fn: joins them.

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
