"""Decide which worker is called with which arguments, for `RayWorkerGroup.run_all_workers_*`.

`worker_groups` makes the planned calls. All functions depend only on their arguments, and only `stored` calls Ray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.tensor_transport import pack_tensors

_SMALL_TYPES = (type(None), bool, int, float, str)


@dataclass
class MultiWorkerFuture:
    """Pending answers of several workers."""

    futures: list[ray.ObjectRef]
    """One Ray reference for each called worker."""
    return_from_workers: list[int] | None = None
    """Workers whose answers are returned. If None, all."""
    called_workers: list[int] | None = None
    """The worker of each future. If None, workers 0, 1, 2 ..."""


@dataclass(frozen=True)
class ShardedCall:
    """One worker's part of a sharded call."""

    worker_idx: int
    """The worker to call."""
    coords: tuple[int, ...] | None
    """Positions of the worker on the sharded axes. None for a dummy call without data."""
    is_wanted: bool
    """Whether the worker's answer is returned."""


def plan_sharded_calls(
    sharding: NamedSharding,
    in_sharded_axes: Sequence[str],
    replicate_on_axes: Sequence[str],
    output_is_replicated: Sequence[str],
    make_dummy_calls_to_free_axes: bool = False,
    return_from_workers: Sequence[int] | None = None,
) -> list[ShardedCall]:
    """Decide which worker is called with which shard and whose answer is returned (`RayWorkerGroup`).

    Raises:
        ValueError: unknown axis, an axis that is both sharded and replicated, or two ways to choose the answers.
    """
    if output_is_replicated and return_from_workers is not None:
        raise ValueError("give output_is_replicated or return_from_workers, not both.")
    if both := set(in_sharded_axes) & set(replicate_on_axes):
        raise ValueError(f"axes {sorted(both)} cannot be both sharded and replicated.")
    for axis in [*in_sharded_axes, *replicate_on_axes, *output_is_replicated]:
        sharding.get_axis_index(axis)
    held = {*in_sharded_axes, *replicate_on_axes}
    free = [name for name in sharding.names if name not in held]
    returned = None if return_from_workers is None else frozenset(return_from_workers)
    calls = []
    for idx in range(sharding.size):
        coords = sharding.get_worker_coords(idx)
        gets_data = sharding.is_axis_zero(coords, free)
        if gets_data or make_dummy_calls_to_free_axes:
            at = tuple(coords[axis] for axis in in_sharded_axes) if gets_data else None
            wanted = sharding.is_axis_zero(coords, output_is_replicated)
            if returned is not None:
                wanted = idx in returned
            calls.append(ShardedCall(idx, at, wanted))
    return calls


def workers_at_zero(sharding: NamedSharding, axes: Sequence[str]) -> list[int]:
    """Return the workers at position 0 of all axes, in order."""
    return [idx for idx in range(sharding.size) if sharding.is_axis_zero(sharding.get_worker_coords(idx), axes)]


def check_nesting(shards: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Check that nested lists have the sizes of the sharded axes, outermost first.

    Raises:
        ValueError: a list has another size.
    """
    for name, nested in shards.items():
        if sizes and (not isinstance(nested, list | tuple) or len(nested) != sizes[0]):
            given = len(nested) if isinstance(nested, list | tuple) else type(nested).__name__
            raise ValueError(f"{name} must be a list of {sizes[0]} shards, got {given}.")
        for inner in nested if sizes else ():
            check_nesting({name: inner}, sizes[1:])


def stored(value: Any, shared: bool = True) -> Any:
    """Store a value that several workers get in Ray's store, once. Return any other value unchanged."""
    value = pack_tensors(value)
    return ray.put(value) if shared and not isinstance(value, _SMALL_TYPES) else value
