"""Define the position of each worker on the named parallel axes.

The position decides which worker receives which shard and whose answer counts. Invariant: a layout contains each worker
id exactly once. Outside this file, axes have names and not numbers.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Union

import numpy as np

REPLICATED_AXES = ("pipeline_parallel", "context_parallel", "tensor_parallel")
"""Axes of a model's ranks along which all ranks get the same rows."""


class NamedSharding:
    """An n-dimensional arrangement of worker ids whose axes have names.

    Example:
        >>> sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        >>> sharding.get_worker_coords(2)
        {'data_parallel': 1, 'tensor_parallel': 0}
        >>> sharding.get_ranks_by_coord(tensor_parallel=1)
        [1, 3]

    Args:
        layout: nested sequence or array of distinct non-negative integers, one per worker.
        names: one name per dimension of `layout`, outermost first.

    Raises:
        ValueError: ragged or non-integer layout, repeated ids, or names that do not fit.
    """

    def __init__(self, layout: Sequence[Any] | np.ndarray, names: Sequence[str]) -> None:
        array = np.array(layout)
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"layout must be a regular array of integer ids, got {layout!r}.")
        array = array.astype(np.int32)
        names = list(names)
        if array.ndim != len(names):
            raise ValueError(f"layout has {array.ndim} dimensions but {len(names)} names were given: {names}.")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names must differ from each other, got {names}.")
        ids, counts = np.unique(array, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"worker ids appear more than once: {ids[counts > 1].tolist()}.")
        array.flags.writeable = False
        self._layout = array
        self._names = names

    @classmethod
    def from_axis_sizes(cls, sizes: Mapping[str, int]) -> "NamedSharding":
        """Number workers 0..n-1 in row-major order over axes of the given sizes."""
        total = int(np.prod(list(sizes.values())))
        return cls(np.arange(total).reshape(tuple(sizes.values())), list(sizes))

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name, outermost first."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """Axis names, outermost first."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._layout.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the worker ids, one dimension per axis, int32."""
        return self._layout.copy()

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Position of each worker in the flattened layout. It is cached because every call of a group needs it."""
        return {int(worker): position for position, worker in enumerate(self._layout.ravel())}

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the position of a worker on each axis.

        Raises:
            ValueError: no such worker.
        """
        position = self._positions.get(worker_id)
        if position is None:
            raise ValueError(f"worker {worker_id} is not in {self!r}.")
        found = np.unravel_index(position, self._layout.shape)
        return {name: int(at) for name, at in zip(self._names, found, strict=True)}

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Sequence[str]) -> bool:
        """Return whether the coordinates are 0 on each of `axes`. An absent axis counts as 0."""
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the sorted ids of the workers at the given positions. Axes that are not named may have any position.

        Raises:
            ValueError: unknown axis or position outside of it.
        """
        return sorted(int(rank) for rank in np.ravel(self._layout[self._index(coords)]))

    def get_ranks(self, **coords: int) -> Union["NamedSharding", int]:
        """Return the sub-layout at the given positions, or the worker id if all axes are given.

        Raises:
            ValueError: unknown axis or position outside of it.
        """
        picked = self._layout[self._index(coords)]
        rest = [name for name in self._names if name not in coords]
        return NamedSharding(picked, rest) if rest else int(picked)

    def get_axis_index(self, name: str) -> int:
        """Return the dimension of the layout that belongs to the axis.

        Raises:
            ValueError: unknown axis.
        """
        if name not in self._names:
            raise ValueError(f"unknown axis {name!r}; the axes are {self._names}.")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of positions on the axis.

        Raises:
            ValueError: unknown axis.
        """
        return self._layout.shape[self.get_axis_index(name)]

    def _index(self, coords: Mapping[str, int]) -> tuple[Any, ...]:
        index: list[Any] = [slice(None)] * self.ndim
        for name, at in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= at < size:
                raise ValueError(f"{name}={at} is outside of 0..{size - 1}.")
            index[self.get_axis_index(name)] = at
        return tuple(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        return hash((tuple(self._names), self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({self._layout.tolist()}, {self._names})"
