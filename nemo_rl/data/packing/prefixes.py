"""The beginnings that rows of a batch have in common: found by the driver, divided into units, sent with the rows.

Invariant: the driver decides what rows share, also for rows whose tokens it does not have. A rank reads it from the
column `SHARED_PREFIXES` and looks for nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.common_prefixes import Path, Prefixes
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.stored_rows import STORED_ROWS, StoredRow
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

SHARED_PREFIXES = "shared_prefixes"
"""Key of a microbatch: `[b, 2]` int64, the place of each row in the order of `Prefixes`, and the tokens that it shares
with the row before it in that order. Absent, or 0 everywhere: the rows share nothing."""

PROMPT_GROUPS = "prompt_groups"
"""Key of a batch: `[B]` int64, equal for the rows of one prompt; -1 for filler rows. Where it is given, only rows of
one prompt share tokens, so that the layout of a batch does not depend on where its tokens are stored."""


def find_prefixes(rows: BatchedDataDict[Any]) -> Prefixes:
    """Find what the rows of a batch share.

    Args:
        rows: `input_ids [b, T]` and `input_lengths [b]`, or stored rows, and `PROMPT_GROUPS` if only rows of one prompt
            share. Stored rows share within their object. Rows with further inputs (`data.model_rows`) share nothing,
            because the model expects their inputs once for each row.
    """
    lengths = rows["input_lengths"].tolist()
    groups = rows[PROMPT_GROUPS].tolist() if PROMPT_GROUPS in rows else None
    if ROW_INPUTS in rows:
        return Prefixes.alone(len(lengths))
    if STORED_ROWS in rows:
        return _of_stored(rows[STORED_ROWS], lengths, groups)
    tokens = [ids[:length] for ids, length in zip(rows["input_ids"].numpy(), lengths, strict=True)]
    return Prefixes.of(tokens) if groups is None else Prefixes.of_groups(tokens, groups)


def _of_stored(stored: Sequence[StoredRow], lengths: Sequence[int], groups: Sequence[int] | None) -> Prefixes:
    """Compare the paths of stored rows; a row that is cut shares nothing, as its path is that of the whole row."""
    numbers: dict[Any, int] = {}
    paths: list[tuple[int, Path]] = []
    for index, (row, length) in enumerate(zip(stored, lengths, strict=True)):
        whole = length > max((depth for depth, _ in row.path.nodes), default=0)
        group = (row.rows, 0 if groups is None else groups[index])
        number = numbers.setdefault(group, len(numbers)) if whole else -1
        paths.append((number, row.path))
    order = sorted(range(len(paths)), key=lambda row: (paths[row][0], paths[row][1].place, row))
    shared = [0] * len(order)
    for place in range(1, len(order)):
        (before, path_before), (here, path) = (paths[order[place - 1]], paths[order[place]])
        if before == here >= 0:
            shared[place] = path_before.shared(path)
    return Prefixes(order, shared)


def column_of(prefixes: Prefixes, rows: Sequence[int]) -> Tensor:
    """Return the column `SHARED_PREFIXES` of one microbatch with these rows, `[b, 2]`."""
    part = prefixes.within(rows)
    entries = {row: (place, shared) for place, (row, shared) in enumerate(zip(part.rows, part.shared, strict=True))}
    return torch.tensor([entries[row] for row in rows], dtype=torch.int64)


def prefixes_of(column: Tensor) -> Prefixes:
    """Read the column `SHARED_PREFIXES` of one microbatch, `[b, 2]`."""
    order = column[:, 0].argsort()
    return Prefixes(order.tolist(), column[order, 1].tolist())


def divide_prefixes(
    prefixes: Prefixes, lengths: Sequence[int], most_tokens: int, most_keys: int | None = None
) -> Iterator[Prefixes]:
    """Divide rows into units that share nothing with each other, or have as many tokens and keys as they may.

    Rows that share most stay together: where a unit becomes too large, it ends before the row that shares least with
    the row before it. A row by itself may be larger than allowed.
    """

    def fits(part: Prefixes) -> bool:
        few_keys = most_keys is None or part.keys(lengths) <= most_keys
        return few_keys and part.tokens(lengths) <= most_tokens

    start = 0
    for place in range(1, len(prefixes.rows)):
        if prefixes.shared[place] == 0:
            yield prefixes.part(start, place)
            start = place
        while start < place and not fits(prefixes.part(start, place + 1)):
            cut = min(range(place, start, -1), key=prefixes.shared.__getitem__)
            yield prefixes.part(start, cut)
            start = cut
    yield prefixes.part(start, len(prefixes.rows))
