"""Define the batch: tensors and lists with a common axis 0.

`worker_groups` shards and moves batches. `data.packing` plans the microbatches of packed or similar-length sequences.
`select_indices` applies the plan here. Invariant: every value has one entry per sample, and an operation on rows treats
all values alike.

A batch that Ray delivered may be in shared memory that other processes read, so its tensors must be copied before they
are changed. `select_indices`, `from_batches`, `repeat_interleave` and `clone` return copies.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.host.device import to_device
from nemo_rl.utils.errors import DataError


class BatchedDataDict[DictT: Mapping[str, Any]](UserDict):
    """A dict of tensors `[B, ...]` and lists of length `B`.

    The type parameter documents which keys to expect: `BatchedDataDict[TrainingBatch]`.
    """

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[Any, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> Self:
        """Join batches along axis 0.

        Lists are concatenated. Tensors `[B, T, ...]` with different `T` are right-padded to the longest. The result's
        keys are sorted.

        Args:
            batches: at least one batch; all have the keys of the first one.
            pad_value_dict: padding value by key; 0 for keys that are absent.

        Raises:
            DataError: no batch, keys that differ, or values that cannot be joined.
        """
        if not batches:
            raise DataError("from_batches needs at least one batch, got none.")
        keys = sorted(batches[0])
        for index, batch in enumerate(batches):
            if set(batch) != set(keys):
                differing = sorted(set(batch) ^ set(keys))
                raise DataError(f"batch {index} differs from batch 0 in the keys {differing}.")
        pad_values = pad_value_dict or {}
        return cls({key: _concat(key, [b[key] for b in batches], pad_values.get(key, 0)) for key in keys})

    @property
    def size(self) -> int:
        """Return the number of samples `B`, read from the first value, or 0 without values."""
        return len(next(iter(self.data.values()))) if self.data else 0

    def check_rows(self) -> int:
        """Check that all values have the same number of rows.

        Returns:
            The number of rows.

        Raises:
            DataError: numbers of rows differ, or a value is neither tensor nor list.
        """
        rows = {key: _rows(key, value) for key, value in self.data.items()}
        if len(set(rows.values())) > 1:
            raise DataError(f"values of a batch need equally many rows, got {rows}.")
        return self.size

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Return the rows from `start` up to `end` (exclusive), as in `list[start:end]`, with tensors as views."""
        return self._each_as(SlicedDataDict, lambda value: value[start:end])

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a new batch with the rows in the order of `indices` (repeats allowed). Tensors are copied.

        Raises:
            DataError: an index is outside of the batch.
        """
        rows = self.check_rows()
        order = [int(i) for i in indices]
        if order and not (-rows <= min(order) and max(order) < rows):
            raise DataError(f"indices must be within a batch of {rows} rows, got {order}.")
        index = torch.tensor(order, dtype=torch.int64)

        def pick(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value[index.to(value.device)]
            return [value[i] for i in order]

        return self._each_as(type(self), pick)

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Put rows back into their original order, in place.

        Args:
            reordered_indices: row `i` of this batch was row `reordered_indices[i]` of the original.

        Raises:
            DataError: not a permutation of the rows.
        """
        rows = self.check_rows()
        order = [int(i) for i in reordered_indices]
        if sorted(order) != list(range(rows)):
            raise DataError(f"reordered_indices must hold each of 0..{rows - 1} once, got {order}.")
        inverse = [0] * rows
        for position, original in enumerate(order):
            inverse[original] = position
        self.data = self.select_indices(inverse).data

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times, with adjacent copies. Items of lists are deep-copied."""

        def repeat(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.repeat_interleave(num_repeats, dim=0)
            return [copy.deepcopy(item) for item in value for _ in range(num_repeats)]

        return self._each_as(type(self), repeat)

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Return the `rank`-th of `chunks` equal contiguous parts.

        Raises:
            DataError: the rows do not divide, or the part does not exist.
        """
        rows = self.check_rows()
        if chunks < 1 or rows % chunks:
            raise DataError(f"{rows} rows do not divide into {chunks} equal chunks.")
        if not 0 <= rank < chunks:
            raise DataError(f"chunk {rank} is outside of 0..{chunks - 1}.")
        per_chunk = rows // chunks
        return self.slice(rank * per_chunk, (rank + 1) * per_chunk)

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list["SlicedDataDict"]:
        """Split each run of `batch_size` rows over the shards, and join the pieces of each shard.

        The first `batch_size / shards` rows of a shard therefore belong to the first global batch, and so on.

        Example:
            rows `0 1 2 3 4 5 6 7`, 2 shards, batch_size 4 -> `0 1 4 5` and `2 3 6 7`.

        Args:
            batch_size: rows of one global batch; if None, all rows are one global batch.
            allow_uneven_shards: if the rows do not divide, give the first shards one more row (shards may then be
                empty); only without `batch_size`.

        Raises:
            DataError: the rows do not divide, or both options are given.
        """
        rows = self.check_rows()
        if shards < 1:
            raise DataError(f"the number of shards must be at least 1, got {shards}.")
        if allow_uneven_shards:
            if batch_size is not None:
                raise DataError("allow_uneven_shards and batch_size cannot be given together.")
            base, extra = divmod(rows, shards)
            ends = [(s + 1) * base + min(s + 1, extra) for s in range(shards)]
            return [self.slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        batch_size = rows if batch_size is None else batch_size
        if batch_size < 0 or (batch_size and rows % batch_size) or batch_size % shards:
            raise DataError(
                f"{rows} rows do not divide into batches of {batch_size} over {shards} shards: "
                f"rows % batch_size and batch_size % shards must both be 0."
            )
        if batch_size in (0, rows):
            return [self.chunk(shard, shards) for shard in range(shards)]
        batches = [self.slice(at, at + batch_size) for at in range(0, rows, batch_size)]
        return [
            SlicedDataDict.from_batches([batch.chunk(shard, shards) for batch in batches]) for shard in range(shards)
        ]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict":
        """Return the `batch_idx`-th run of `batch_size` rows. If `batch_size` is None, return all rows.

        Raises:
            DataError: the run reaches outside of the batch.
        """
        rows = self.check_rows()
        batch_size = rows if batch_size is None else batch_size
        start, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        if start < 0 or end > rows:
            raise DataError(f"rows {start}..{end - 1} are outside of a batch of {rows} rows.")
        return self.slice(start, end)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator["SlicedDataDict"]:
        """Iterate over consecutive slices of `microbatch_size` rows.

        Raises:
            DataError: the rows do not divide.
        """
        rows = self.check_rows()
        if microbatch_size < 1 or rows % microbatch_size:
            raise DataError(f"{rows} rows do not divide into microbatches of {microbatch_size}.")
        return (self.slice(at, at + microbatch_size) for at in range(0, rows, microbatch_size))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has dimension `dim` to at most `truncated_len` there, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def to(self, device: str | torch.device) -> Self:
        """Move tensors to `device`, in place.

        Returns:
            This batch.
        """
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = to_device(value, torch.device(device))
        return self

    def clone(self) -> Self:
        """Return a batch with copies of tensors and list items, which can be changed."""
        return self._each_as(
            type(self),
            lambda value: value.clone() if torch.is_tensor(value) else copy.deepcopy(value),
        )

    def all_gather(self, group: dist.ProcessGroup) -> Self:
        """Join the batches of all ranks of `group` in rank order. Every rank must make this call."""
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self, group=group)
        return type(self).from_batches(parts)

    def get_dict(self) -> dict[Any, Any]:
        """Return a plain dict with the same values."""
        return dict(self.data)

    def _each_as[BatchT: BatchedDataDict](self, kind: type[BatchT], change: Callable[[Any], Any]) -> BatchT:
        for key, value in self.data.items():
            _rows(key, value)
        return kind({key: change(value) for key, value in self.data.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), pack_tensors(self.data))


class SlicedDataDict[DictT: Mapping[str, Any]](BatchedDataDict[DictT]):
    """Some rows of a `BatchedDataDict`. Tensors may be views of the whole batch."""


def _rebuild[BatchT: BatchedDataDict](kind: type[BatchT], data: dict[Any, Any]) -> BatchT:
    batch = kind()
    batch.data = data
    return batch


def _rows(key: Any, value: Any) -> int:
    if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0):
        return len(value)
    raise DataError(
        f"a batch holds tensors [B, ...] and lists of length B, but {key!r} is "
        f"{'a 0-d tensor' if torch.is_tensor(value) else type(value).__name__}."
    )


def _concat(key: Any, values: list[Any], pad_value: int | float) -> Any:
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, torch.Tensor) and value.ndim > 0 for value in values):
        raise DataError(f"cannot join {key!r}: it holds {[type(v).__name__ for v in values]}.")
    shapes = [tuple(value.shape) for value in values]
    if len({(len(s), s[2:]) for s in shapes}) > 1 or len({v.dtype for v in values}) > 1:
        dtypes = [str(value.dtype) for value in values]
        raise DataError(f"cannot join {key!r}: shapes {shapes}, dtypes {dtypes}.")
    if len(shapes[0]) == 1 or len({s[1] for s in shapes}) == 1:
        return torch.cat(values)
    joined = values[0].new_full((sum(s[0] for s in shapes), max(s[1] for s in shapes), *shapes[0][2:]), pad_value)
    row = 0
    for value in values:
        joined[row : row + value.shape[0], : value.shape[1]] = value
        row += value.shape[0]
    return joined
