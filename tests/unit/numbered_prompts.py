"""Prompt streams over rows that are their own numbers."""

import os
from collections import Counter
from typing import Any

from nemo_rl.data.loader import PromptLoader, build_loader
from nemo_rl.data.streams.prompt_stream import PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class Rows:
    """A data set whose rows are their numbers; it counts how often each is prepared in this process."""

    def __init__(self, size: int):
        self.size = size
        self.prepared: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        self.prepared[row] += 1
        return row


def collate(rows: list[int]) -> BatchedDataDict[Any]:
    """Return the rows, and the process that prepared them."""
    return BatchedDataDict({"idx": rows, "process": os.getpid()})


def make_loader(rows: Rows, batch_size: int = 3, **options: Any) -> PromptLoader:
    """Make a loader, shuffled unless `options` for `build_loader` change it."""
    options = {"shuffle": True, "seed": 5, "collate_fn": collate} | options
    return build_loader(rows, batch_size, **options)  # type: ignore[arg-type]


def make_stream(num_rows: int = 12, batch_size: int = 3, max_epochs: int = 2, **options: Any) -> PromptStream:
    """Make a stream over `num_rows` rows."""
    return PromptStream(make_loader(Rows(num_rows), batch_size, **options), max_epochs)
