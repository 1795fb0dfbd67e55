"""Manage groups of worker processes, with one Ray actor per rank. All actors are called together.

`models.policy` and `models.generation` own the groups; `worker_process` runs inside each actor.

    controller                                   worker process, one per bundle
    RayWorkerGroup --build/call (Ray)--> WorkerHost --> worker object (policy, engine ...)
                ^  `- run_all_workers_*: returns immediately with a MultiWorkerFuture
        `--- get_all_worker_results: waits with a deadline (`worker_results.gather`)

Invariants: every wait has a deadline. A worker's death is reported with its last log lines. After `shutdown`, no worker
process is left.
"""

import logging
import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl.distributed.cluster.node_health import describe_losses
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.workers.builder import RayWorkerBuilder, facts_of, plan_places
from nemo_rl.distributed.workers.calls import (
    MultiWorkerFuture,
    check_nesting,
    plan_sharded_calls,
    stored,
    workers_at_zero,
)
from nemo_rl.distributed.workers.lifetime import await_start, find_loss, first_line, kill_workers
from nemo_rl.distributed.workers.logs import activity_of, stacks_of
from nemo_rl.distributed.workers.results import PendingCall, WorkerSlot, explain_failure, gather
from nemo_rl.distributed.workers.start_phases import WorkerPhase
from nemo_rl.host.boundary import Boundary
from nemo_rl.utils.errors import DeadlineExceededError, NodeLostError, RayDiedError, WorkerDiedError

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

logger = logging.getLogger(__name__)

_irreplaceable: "weakref.WeakSet[RayWorkerGroup]" = weakref.WeakSet()
"""Groups whose workers are replaced all together or not at all."""


class RayWorkerGroup:
    """Workers on the bundles of a cluster, numbered node by node.

    Each worker process finds RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment. If its group has several
    workers, it also finds MASTER_ADDR and MASTER_PORT, a port that the first worker's process holds for
    `process_group.open_store`. All processes start at the same time.

    Args:
        cluster: bundles in which the workers run.
        remote_worker_builder: recipe for each worker.
        workers_per_node: workers on each node entry (one number, or one for each entry); if None, one on every bundle.
        name_prefix: actors are named `<prefix>-<node>-<local rank>`; if empty, the class name.
        bundle_indices_list: instead of `workers_per_node`, pairs (node entry, bundle indices); one
            worker runs in each bundle listed.
        sharding_annotations: parallel axes of the workers; if None, one axis `data_parallel`.
        env_vars: further environment, set before the process imports anything.
        setup_timeout_s: seconds within which processes and worker objects must be ready.
        call_timeout_s: time limit of a call in seconds, unless `get_all_worker_results` gets another limit.
        ranks_per_unit: number of consecutive workers that depend on each other, such as the ranks of one engine. If one
            dies, workers outside its block continue. If None, all workers depend on each other: if one dies or misses a
            deadline, all are killed, because they would wait for it. `restart_all` replaces them.

    Raises:
        ResourceInsufficientError: the cluster lacks the resources.
        DeadlineExceededError: the workers were not ready in time.
        WorkerDiedError: a process ended during setup.
        Exception: an error that a worker's constructor raised.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        setup_timeout_s: float = 900.0,
        call_timeout_s: float = 3600.0,
        ranks_per_unit: int | None = None,
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix or remote_worker_builder.class_name
        self._builder = remote_worker_builder
        self._env_vars = dict(env_vars or {})
        self._call_timeout_s = call_timeout_s
        self._places = plan_places(cluster.bundle_counts, workers_per_node, bundle_indices_list)
        world_size = len(self._places)
        self._may_restart = ranks_per_unit is not None
        self._ranks_per_unit = ranks_per_unit or world_size
        self.sharding_annotations = sharding_annotations or NamedSharding.from_axis_sizes({"data_parallel": world_size})
        if sorted(self.sharding_annotations.layout.ravel()) != list(range(world_size)):
            raise ValueError(
                f"sharding_annotations must arrange the workers 0..{world_size - 1}, got {self.sharding_annotations!r}."
            )
        self._slots: list[WorkerSlot] = []
        self.start_phases: list[WorkerPhase] = []
        """Seconds of each phase of the first start, with the slowest worker of each."""
        self._cause_of_death: str | None = None
        self._awaits_restart = False
        if not self._may_restart:
            _irreplaceable.add(self)
        began = time.monotonic()
        try:
            for rank in range(world_size):
                self._slots.append(self._create_slot(rank))
            self.start_phases = self._settle(self._slots, list(range(world_size)), setup_timeout_s, began)
        except BaseException:
            kill_workers(self._slots)
            raise

    @property
    def workers(self) -> list[Any]:
        """Ray actor handles in rank order."""
        return [slot.handle for slot in self._slots]

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """Facts about each worker: name, global_rank, local_rank, node_idx, bundle_idx, pid, node_ip."""
        return [facts_of(slot, place) for slot, place in zip(self._slots, self._places, strict=True)]

    @property
    def dp_size(self) -> int:
        """Size of the data-parallel axis, or 1 without one."""
        return self.sharding_annotations.shape.get("data_parallel", 1)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the worker at a position of the data-parallel axis that is first on all other axes."""
        sharding = self.sharding_annotations
        first = {name: 0 for name in sharding.names if name != "data_parallel"}
        return sharding.get_ranks_by_coord(data_parallel=dp_shard_idx, **first)[0]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ray.ObjectRef:
        """Call a method of one worker, and return Ray's reference.

        Await the reference or wait with `get_worker_result`, and pass its errors to `explain_failure`.
        """
        self._refuse_when_dead()
        return self._call(worker_idx, method_name, pack_tensors(args), pack_tensors(kwargs))

    def run_all_workers_single_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        workers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call a method with the same arguments on all workers.

        Args:
            *args: positional arguments, each of which is stored once for all workers.
            run_rank_0_only_axes: call only workers at position 0 of these axes.
            workers: call only these workers.
            **kwargs: keyword arguments, each of which is stored once too.
        """
        self._refuse_when_dead()
        at_zero = workers_at_zero(self.sharding_annotations, run_rank_0_only_axes or [])
        wanted = range(len(self._slots)) if workers is None else frozenset(workers)
        chosen = [idx for idx in at_zero if idx in wanted]
        shared_args = [stored(value) for value in args]
        shared_kwargs = {name: stored(value) for name, value in kwargs.items()}
        refs = [self._call(idx, method_name, shared_args, shared_kwargs) for idx in chosen]
        return MultiWorkerFuture(refs, called_workers=chosen)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> MultiWorkerFuture:
        """Call a method with each worker's own arguments.

        Args:
            run_rank_0_only_axes: call only workers at position 0 of these axes.
            common_kwargs: arguments that all workers get.
            **kwargs: lists with one value for each called worker.

        Raises:
            ValueError: a list does not hold one value for each called worker.
        """
        self._refuse_when_dead()
        chosen = workers_at_zero(self.sharding_annotations, run_rank_0_only_axes or [])
        for name, values in kwargs.items():
            if len(values) != len(chosen):
                raise ValueError(f"{name} holds {len(values)} values for {len(chosen)} workers.")
        common = {name: stored(value) for name, value in (common_kwargs or {}).items()}
        refs = []
        for position, idx in enumerate(chosen):
            own = {name: pack_tensors(values[position]) for name, values in kwargs.items()}
            refs.append(self._call(idx, method_name, (), {**common, **own}))
        return MultiWorkerFuture(refs, called_workers=chosen)

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: list[str] | None = None,
        replicate_on_axes: list[str] | None = None,
        output_is_replicated: list[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        return_from_workers: Sequence[int] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call a method with the shard for each worker's position.

        Args:
            in_sharded_axes: axes over which the values are sharded, outermost first.
            replicate_on_axes: axes along which all workers get the same shard. On all other axes, only workers at
                position 0 are called.
            output_is_replicated: axes along which answers are equal, so that only position 0 is returned.
            make_dummy_calls_to_free_axes: call the remaining workers too, with None as data.
            return_from_workers: workers whose answers are returned, if not those at position 0.
            common_kwargs: arguments that all workers get unchanged.
            **kwargs: nested lists indexed by the positions on `in_sharded_axes`. A shard that
                several workers get is stored once.

        Raises:
            ValueError: unknown axis, an axis in both lists, a list of the wrong length, or both options to choose
                answers.
        """
        self._refuse_when_dead()
        sharding, sharded, replicated = self.sharding_annotations, in_sharded_axes or [], replicate_on_axes or []
        plan = plan_sharded_calls(
            sharding,
            sharded,
            replicated,
            output_is_replicated or [],
            make_dummy_calls_to_free_axes,
            return_from_workers,
        )
        several = math.prod(sharding.get_axis_size(axis) for axis in replicated) > 1
        check_nesting(kwargs, [sharding.get_axis_size(axis) for axis in sharded])
        common = {name: stored(value) for name, value in (common_kwargs or {}).items()}
        shards: dict[tuple[int, ...] | None, dict[str, Any]] = {None: dict.fromkeys(kwargs)}
        refs = []
        for call in plan:
            if call.coords is not None and call.coords not in shards:
                shards[call.coords] = {
                    name: stored(reduce(getitem, call.coords, nested), several) for name, nested in kwargs.items()
                }
            own = shards[call.coords]
            refs.append(self._call(call.worker_idx, method_name, (), {**common, **own}))
        return MultiWorkerFuture(
            refs,
            return_from_workers=[call.worker_idx for call in plan if call.is_wanted],
            called_workers=[call.worker_idx for call in plan],
        )

    def get_all_worker_results(
        self,
        future_bundle: MultiWorkerFuture,
        timeout_s: float | None = None,
        phase: str = "call",
    ) -> list[Any]:
        """Wait for all called workers.

        Args:
            future_bundle: result of a `run_all_workers_*` method.
            timeout_s: seconds from now; if None, the group's `call_timeout_s`.
            phase: name of the call for errors.

        Returns:
            The selected answers in worker order.

        Raises:
            DeadlineExceededError: a worker did not answer in time. The message contains the stacks of all workers.
            WorkerDiedError: a worker ended. The message contains its last log lines.
            Exception: an error that a worker raised; its cause is the remote traceback.
        """
        calls = self.pending_calls(future_bundle)
        with self._one_fails_all_end():
            answers = gather(calls, self._slots, self._call_timeout_s if timeout_s is None else timeout_s, phase)
        wanted = future_bundle.return_from_workers
        if wanted is None:
            return answers
        by_worker = {call.slot.rank: answer for call, answer in zip(calls, answers, strict=True)}
        return [by_worker[idx] for idx in wanted]

    def slot(self, worker_idx: int) -> WorkerSlot:
        """Return the name and place of a worker, for waits and errors."""
        return self._slots[worker_idx]

    def pending_calls(self, future_bundle: MultiWorkerFuture) -> list[PendingCall]:
        """Return the calls of a bundle with their workers, so that the caller can wait for several groups together."""
        called = future_bundle.called_workers
        if called is None:
            called = list(range(len(future_bundle.futures)))
        return [PendingCall(ref, self._slots[idx]) for idx, ref in zip(called, future_bundle.futures, strict=True)]

    def get_worker_result(
        self, ref: ray.ObjectRef, worker_idx: int, timeout_s: float | None = None, phase: str = "call"
    ) -> Any:
        """Wait for one worker's answer, with the deadline and errors of `get_all_worker_results`."""
        return self.get_all_worker_results(MultiWorkerFuture([ref], called_workers=[worker_idx]), timeout_s, phase)[0]

    def explain_failure(self, error: RayError, worker_idx: int, phase: str) -> Exception:
        """Convert an error from a worker's awaited reference into the error to show."""
        return explain_failure(error, self._slots[worker_idx], phase)

    def activity(self, worker_idxs: Sequence[int]) -> list[tuple[str, float]]:
        """Return the state and CPU seconds of some workers' processes (`worker_logs.activity_of`)."""
        known = [slot.identity for slot in (self._slots[idx] for idx in worker_idxs) if slot.identity]
        return activity_of(known)

    def stacks(self, worker_idxs: Sequence[int]) -> str:
        """Return the stacks of all threads of some workers, if they respond."""
        return stacks_of([slot.identity for slot in (self._slots[idx] for idx in worker_idxs) if slot.identity])

    def meeting_point(self, rank: int) -> tuple[str, int]:
        """Return the address of a rank, and a port that its process holds for one `process_group.open_store`."""
        return self.get_worker_result(self._hold_port(self._slots[rank]), rank, phase="choosing a port")

    def _hold_port(self, slot: WorkerSlot) -> ray.ObjectRef:
        return slot.handle.hold_port.remote(*self.cluster.port_range)

    def restart_workers(self, worker_idxs: Sequence[int], timeout_s: float = 900.0) -> None:
        """Replace the processes and worker objects of whole blocks of `ranks_per_unit` workers at the same time.

        For groups with `ranks_per_unit`. Running old processes are killed, and all new ones if one of them fails.

        Raises:
            DeadlineExceededError, WorkerDiedError, Exception: as in the constructor.
            NodeLostError: workers that cannot be replaced were on a lost node, so the run is over.
            ResourceInsufficientError: their node was lost, and no other node has room.
            ConfigError: another node has room, but differs in code or folders.
            WorkerDiedError: the group was shut down, perhaps during the restart.
        """
        if not self._may_restart:
            raise ValueError(f"workers of group {self.name_prefix!r} depend on each other.")
        self._refuse_when_dead()
        _refuse_when_others_are_lost()
        self.cluster.await_places({self._places[idx].node_idx for idx in worker_idxs})
        end, slots = time.monotonic() + timeout_s, self._slots
        kill_workers([slots[idx] for idx in worker_idxs])
        try:
            for idx in worker_idxs:
                slots[idx] = self._create_slot_again(idx, end)
            self._refuse_when_dead()
            self._settle(slots, worker_idxs, end - time.monotonic())
        except BaseException:
            kill_workers([slots[idx] for idx in worker_idxs])
            self._refuse_when_dead()
            raise

    def end_workers(self, worker_idxs: Sequence[int]) -> None:
        """Kill workers, so that calls to them raise RayActorError until `restart_workers`."""
        kill_workers([self._slots[idx] for idx in worker_idxs])

    def find_loss(self, *, silence_is_loss: bool) -> str | None:
        """Return a one-line reason why `restart_all` is necessary, or None.

        If a worker is lost, all workers are killed, so that their lost nodes do not prevent restarts of other groups.
        Arguments and errors are those of `workers.lifetime.find_loss`.
        """
        if self._cause_of_death is None and (loss := find_loss(self._slots, silence_is_loss=silence_is_loss)):
            self.end(loss)
        self._awaits_restart = self._cause_of_death is not None
        return self._cause_of_death

    def end(self, cause: str) -> None:
        """Kill all workers, so that calls raise the cause until `restart_all`."""
        self._cause_of_death = self._cause_of_death or cause
        kill_workers(self._slots)

    def restart_all(self, timeout_s: float) -> None:
        """Replace the processes and worker objects of all workers in their bundles, even after the group has ended.

        Raises:
            Exception: as in the constructor, and after the loss of a node as in `restart_workers`.
        """
        if not self._slots:
            self._refuse_when_dead()
        end, ranks = time.monotonic() + timeout_s, list(range(len(self._places)))
        self.end("it is being restarted")
        self.cluster.await_places({place.node_idx for place in self._places})
        self._cause_of_death, self._awaits_restart = None, False
        try:
            for rank in ranks:
                self._slots[rank] = self._create_slot_again(rank, end)
            self._settle(self._slots, ranks, end - time.monotonic())
        except BaseException as failure:
            self.end(f"its restart failed: {first_line(failure)}")
            raise

    def _create_slot_again(self, rank: int, end: float) -> WorkerSlot:
        """Call `_create_slot` repeatedly until Ray has freed the dead actor's name, which takes a moment."""
        while True:
            self._refuse_when_dead()
            try:
                return self._create_slot(rank)
            except ValueError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End all worker processes. Repeated calls are allowed.

        Args:
            cleanup_method: method that each worker runs first.
            timeout: seconds for that method; if None, `call_timeout_s`.
            force: skip the method.

        Returns:
            Whether the method succeeded everywhere and no process on this node is left.
        """
        clean = True
        if cleanup_method and not force and self._slots and self._cause_of_death is None:
            with Boundary(Exception) as caught:  # processes must end even if cleanup fails
                future = self.run_all_workers_single_data(cleanup_method)
                self.get_all_worker_results(future, timeout, "cleanup")
            if caught:
                logger.warning("%s: %s failed: %s", self.name_prefix, cleanup_method, caught.take())
                clean = False
        slots, self._slots = self._slots, []
        return kill_workers(slots) and clean

    def _create_slot(self, rank: int) -> WorkerSlot:
        place = self._places[rank]
        environment = {
            **self._env_vars,
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(len(self._places)),
            "NODE_RANK": str(place.node_idx),
        }
        return self._builder.create_slot(
            f"{self.name_prefix}-{place.node_idx}-{place.local_rank}",
            rank,
            self.cluster.get_placement_groups()[place.node_idx],
            place.bundle_idx,
            environment,
            **self.cluster.resources_per_worker(),
        )

    def _settle(
        self, slots: list[WorkerSlot], indices: Sequence[int], timeout_s: float, began: float = 0.0
    ) -> list[WorkerPhase]:
        """Wait until processes run and have built their worker objects. Return the phases (`await_start`)."""
        end, size = time.monotonic() + timeout_s, self._ranks_per_unit
        reports = [slots[idx].handle.report_identity.remote() for idx in indices]
        firsts = {idx // size * size for idx in indices} if size > 1 or not self._may_restart else set()
        meetings = {first: self._hold_port(slots[first]) for first in firsts}
        arguments = self._builder.put_arguments()
        builds = [self._builder.build_in(slots[idx], arguments, meetings.get(idx // size * size)) for idx in indices]
        return await_start(slots, indices, (reports, builds), end, f"{self.name_prefix} setup", began)

    def _call(self, idx: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ray.ObjectRef:
        call = self._slots[idx].handle.call.options(name=f"{self.name_prefix}.{method_name}")
        return call.remote(method_name, *args, **kwargs)

    @contextmanager
    def _one_fails_all_end(self) -> Iterator[None]:
        try:
            yield
        except (WorkerDiedError, DeadlineExceededError, RayDiedError) as error:
            if not self._may_restart:
                self.end(first_line(error))
            raise

    def _refuse_when_dead(self) -> None:
        if self._cause_of_death is not None:
            raise WorkerDiedError(f"Group {self.name_prefix!r} has ended: {self._cause_of_death}")
        if not self._slots:
            raise WorkerDiedError(f"Group {self.name_prefix!r} has been shut down.")


def _refuse_when_others_are_lost() -> None:
    slots = [slot for group in list(_irreplaceable) if not group._awaits_restart for slot in group._slots]
    losses = describe_losses(slot.identity for slot in slots if slot.identity)
    if losses:
        raise NodeLostError(losses)
