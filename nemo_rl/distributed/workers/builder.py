"""Create a worker of a group: its placement, and the recipe for its process.

`worker_groups` plans placements and creates a `WorkerSlot` in each, in which `worker_process` then runs. Invariant:
this file never waits for a worker. A `WorkerSlot` is returned before its process has started.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config import VenvConfig
from nemo_rl.distributed.ray_actor_environment_registry import make_actor_runtime_env
from nemo_rl.distributed.workers.process import AsyncWorkerHost, WorkerHost
from nemo_rl.distributed.workers.results import WorkerSlot
from nemo_rl.files.trusted_code import trusted_code
from nemo_rl.optimizations.fork_server import needs_own_start, server_socket

# # Variables with these prefixes are read at the start of a process, so the worker cannot set them. If one is given,
# Ray starts a new process for the worker.
_READ_AT_PROCESS_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_", "CUDA_VISIBLE_")


def _is_read_early(name: str, value: str) -> bool:
    """Return whether a variable must be set before the worker's process starts."""
    is_fork = server_socket() is not None
    return name.startswith(_READ_AT_PROCESS_START) or (is_fork and needs_own_start({name: value}))


class RayWorkerBuilder:
    """Recipe for one kind of worker: a class by name and its constructor arguments.

    Args:
        ray_actor_class_fqn: `package.module.Class`, which is imported only in the worker process.
        *args: positional arguments of its constructor.
        **kwargs: keyword arguments of its constructor.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self.max_concurrency: int | None = None
        self._runtime_env: dict[str, Any] | None = None
        self._actor_class: Any = None

    def in_environment(self, venv: VenvConfig | None, name: str, timeout_s: float) -> Self:
        """Run each worker in another Python environment (`ray_actor_environment_registry.make_actor_runtime_env`).

        Ray must be running, because this waits until the environment exists on every node.

        Args:
            venv: the requested environment; if None, that of the registry.
            timeout_s: time limit in seconds for making the environment.
        """
        self._runtime_env = make_actor_runtime_env(self.ray_actor_class_fqn, venv, name, timeout_s)
        return self

    def asynchronous(self, max_concurrency: int) -> Self:
        """Let up to `max_concurrency` coroutine methods of each worker run concurrently."""
        self.max_concurrency = max_concurrency
        self._actor_class = None
        return self

    @property
    def class_name(self) -> str:
        """Name of the class without its module."""
        return self.ray_actor_class_fqn.rpartition(".")[2]

    def create_slot(
        self,
        name: str,
        rank: int,
        placement_group: PlacementGroup,
        bundle_index: int,
        environment: Mapping[str, str],
        **options: Any,
    ) -> WorkerSlot:
        """Request the worker's process in a bundle from Ray, and return before the process runs.

        Args:
            name: actor name, unique in this run.
            rank: position in the group.
            placement_group: group of bundles in which it runs.
            bundle_index: the bundle in that group.
            environment: variables of the worker, which are set before it imports anything.
            **options: further Ray actor options (resources ...).
        """
        at_start = {key: value for key, value in environment.items() if _is_read_early(key, value)}
        if self._runtime_env is None:
            self._runtime_env = make_actor_runtime_env(self.ray_actor_class_fqn)
        runtime_env = self._runtime_env | ({"env_vars": at_start} if at_start else {})
        if runtime_env:
            options["runtime_env"] = runtime_env
        if self.max_concurrency is not None:
            # # One more call must be possible, to report where the others wait.
            options["max_concurrency"] = self.max_concurrency + 1
        handle = (
            self._titled()
            .options(
                name=name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=bundle_index
                ),
                max_restarts=0,
                **options,
            )
            .remote(name, rank, dict(environment))
        )
        return WorkerSlot(name, rank, handle, is_async=self.max_concurrency is not None)

    def _titled(self) -> Any:
        """Return the actor class. All workers share one class, because Ray pickles and sends each new class."""
        if self._actor_class is None:
            host = WorkerHost if self.max_concurrency is None else AsyncWorkerHost
            # # The subclass only has the worker's name, for process titles and Ray's tools.
            self._actor_class = ray.remote(type(self.class_name, (host,), {}))
        return self._actor_class

    def put_arguments(self) -> ray.ObjectRef:
        """Store the constructor's arguments and the code that may run for `build_in`, once for all workers."""
        return ray.put((self.args, self.kwargs, trusted_code()))

    def build_in(
        self, slot: WorkerSlot, arguments: ray.ObjectRef, meeting_point: ray.ObjectRef | None
    ) -> ray.ObjectRef:
        """Start to construct the worker object in a process, which awaits `arguments` and `meeting_point`."""
        return slot.handle.build.remote(self.ray_actor_class_fqn, arguments, meeting_point)


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's node entry, its position among the group's workers there, and its bundle."""

    node_idx: int
    local_rank: int
    bundle_idx: int


def facts_of(slot: WorkerSlot, place: WorkerPlace) -> dict[str, Any]:
    """Return name, ranks, node, bundle and process of a worker (`RayWorkerGroup.worker_metadata`)."""
    where = slot.identity
    return {
        "name": slot.name,
        "global_rank": slot.rank,
        "local_rank": place.local_rank,
        "node_idx": place.node_idx,
        "bundle_idx": place.bundle_idx,
        "pid": where.pid if where else None,
        "node_ip": where.node_ip if where else None,
    }


def plan_places(
    counts: Sequence[int],
    workers_per_node: int | list[int] | None,
    bundle_indices_list: list[tuple[int, list[int]]] | None,
) -> list[WorkerPlace]:
    """Decide which bundles get a worker, in rank order.

    Args:
        counts: bundles of each node entry.
        workers_per_node: workers on the first bundles of each entry; if None, on every bundle.
        bundle_indices_list: instead, pairs (node entry, bundle indices).

    Raises:
        ValueError: both are given, or a bundle does not exist.
    """
    if bundle_indices_list is not None:
        if workers_per_node is not None:
            raise ValueError("give workers_per_node or bundle_indices_list, not both.")
        chosen = [(node, bundle) for node, bundles in bundle_indices_list for bundle in bundles]
    else:
        per_node = workers_per_node if workers_per_node is not None else counts
        if isinstance(per_node, int):
            per_node = [per_node] * len(counts)
        if len(per_node) != len(counts):
            raise ValueError(f"workers_per_node={per_node} must have {len(counts)} entries.")
        chosen = [(node, bundle) for node, number in enumerate(per_node) for bundle in range(number)]
    places: list[WorkerPlace] = []
    on_node = Counter[int]()
    for node, bundle in chosen:
        if not (0 <= node < len(counts) and 0 <= bundle < counts[node]):
            raise ValueError(f"worker on bundle {bundle} of node {node}: the nodes have {counts} bundles.")
        places.append(WorkerPlace(node, on_node[node], bundle))
        on_node[node] += 1
    return places
