"""Measure what the driver does at the start of a run with 10, 100 and 1,000 workers, most of which are stand-ins.

    python tools/benchmarks/simulation/start_at_scale.py                          # 10, 100 and 1,000 workers
    python tools/benchmarks/simulation/start_at_scale.py --workers 1000 --start-s 0 --build-s 0 --profile

Real are Ray, the placement groups (one for each machine of 8 GPUs, all on this machine), the requests for 1,000 named
actors in them, `RayWorkerGroup` with its calls, waits and end, and the arguments of a policy's ranks. Simulated are the
processes: the requested actors wait for a resource that no machine has, so none is started, and two actors answer in
their place. Each stand-in sleeps `--start-s` before its first answer (process, imports) and `--build-s` in its
constructor (process groups, inspection of the model, weights), both log-normal with a deviation of `--sigma`.

Each line gives a phase's seconds and the driver's processor seconds. What exceeds the sleep of the slowest stand-in is
the cost of the start itself; connections to 1,000 different processes are not in it.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from stand_ins import LogNormal

from nemo_rl.config import GRPOMasterConfig, load_config
from nemo_rl.distributed.cluster.node_choice import NodeRoom, choose_nodes
from nemo_rl.distributed.named_sharding import REPLICATED_AXES
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.workers.process import WorkerIdentity
from nemo_rl.distributed.workers.results import WorkerSlot
from nemo_rl.models.policy.workers.rank import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples/configs/recipes/llm/grpo-qwen3-30ba3b-2n8g-megatron.yaml"
NUM_HOSTS = 2
_CALL_METHODS = ("report_identity", "hold_port", "build", "call")


class Host:
    """Actor that answers for many workers: each answer comes after the sleeps of its worker.

    Args:
        sleeps: seconds until a worker's process answers, and those of its constructor, by rank.
        node_id: node that the workers report.
    """

    def __init__(self, sleeps: Mapping[int, tuple[float, float]], node_id: str) -> None:
        self._sleeps = sleeps
        self._node_id = node_id
        self._began: dict[int, float] = {}

    async def _started(self, rank: int) -> None:
        began = self._began.setdefault(rank, time.monotonic())
        await asyncio.sleep(max(began + self._sleeps[rank][0] - time.monotonic(), 0.0))

    async def report_identity(self, name: str, rank: int) -> WorkerIdentity:
        """Answer as `WorkerHost.report_identity`, with a process that does not exist."""
        await self._started(rank)
        return WorkerIdentity(
            name=name,
            rank=rank,
            pid=2**22 + 1 + rank,
            start_ticks=0,
            node_id=self._node_id,
            node_ip="127.0.0.1",
            log_paths=(),
            stacks_path="",
        )

    async def hold_port(self, name: str, rank: int, *_: Any) -> tuple[str, int]:
        """Answer as `WorkerHost.hold_port`."""
        await self._started(rank)
        return "127.0.0.1", 1

    async def build(self, name: str, rank: int, *_: Any) -> dict[str, float]:
        """Answer as `WorkerHost.build`; the arguments have arrived."""
        await self._started(rank)
        await asyncio.sleep(self._sleeps[rank][1])
        return {"constructor": self._sleeps[rank][1]}

    async def call(self, name: str, rank: int, *_: Any, **__: Any) -> int:
        """Answer as `WorkerHost.call`."""
        return rank


class _Method:
    """A method of a stand-in's handle."""

    def __init__(self, method: Any, worker: tuple[str, int]) -> None:
        self._method = method
        self._worker = worker

    def options(self, **options: Any) -> "_Method":
        """Return the method with Ray's options."""
        return _Method(self._method.options(**options), self._worker)

    def remote(self, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Call the host."""
        return self._method.remote(*self._worker, *args, **kwargs)


class StandIn(ActorHandle):  # type: ignore[type-arg]
    """Handle of a requested actor that is never started; `ray.kill` withdraws the request, calls go to a host."""

    def __init__(self, requested: Any, host: Any, worker: tuple[str, int]) -> None:
        self._requested = requested
        self._ray_actor_id = requested._ray_actor_id
        for name in _CALL_METHODS:
            setattr(self, name, _Method(getattr(host, name), worker))

    def __del__(self) -> None:
        """Leave the reference to the requested handle."""


@dataclass
class StandInBuilder(RayWorkerBuilder):
    """Builder whose workers are requested in a placement group that waits for ever.

    Attributes:
        hosts: actors that answer.
        nowhere: the placement group.
        requested: times before the first request and after the last one.
        called: the same of the calls of constructors.
    """

    hosts: Sequence[Any]
    nowhere: PlacementGroup
    arguments: tuple[Any, ...]
    requested: list[float] = field(default_factory=list)
    called: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__("nemo_rl.models.policy.workers.rank.PolicyRank", *self.arguments)

    def create_slot(
        self,
        name: str,
        rank: int,
        placement_group: PlacementGroup,
        bundle_index: int,
        environment: Mapping[str, str],
        **options: Any,
    ) -> WorkerSlot:
        """See `RayWorkerBuilder.create_slot`."""
        began = time.perf_counter()
        slot = super().create_slot(name, rank, self.nowhere, 0, environment, **options)
        self.requested += [began, time.perf_counter()]
        return WorkerSlot(name, rank, StandIn(slot.handle, self.hosts[rank % len(self.hosts)], (name, rank)))

    def build_in(self, *given: Any) -> ray.ObjectRef:
        """See `RayWorkerBuilder.build_in`."""
        began = time.perf_counter()
        ref = super().build_in(*given)
        self.called += [began, time.perf_counter()]
        return ref


@dataclass
class Phases:
    """Seconds and processor seconds of the driver, by phase."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.perf_counter() - wall, time.process_time() - processor


def measure(num_workers: int, per_node: int, options: argparse.Namespace) -> Phases:
    """Start and end a group of stand-ins; Ray runs."""
    phases = Phases()
    layout = ParallelLayout(dp_shard=num_workers)
    sleeps = _sleeps(num_workers, options)
    node_id = ray.get_runtime_context().get_node_id()
    host: Any = ray.remote(Host).options(num_cpus=0, max_concurrency=8 * num_workers)
    hosts = [
        host.remote({rank: own for rank, own in sleeps.items() if rank % NUM_HOSTS == number}, node_id)
        for number in range(NUM_HOSTS)
    ]
    arguments = _rank_arguments(layout)
    # The modules of arguments and answers are imported now, as each worker does for itself.
    ray.get([each.call.remote("", 0, *arguments, WorkerIdentity) for each in hosts])
    counts = [per_node] * (num_workers // per_node) + [num_workers % per_node] * bool(num_workers % per_node)
    with phases.phase("nodes chosen"):
        _choose(counts)
    cluster = RayVirtualCluster(counts, False, placement_group_strategy="PACK", cpus_per_bundle=0.001)
    with phases.phase("places reserved"):
        cluster.get_placement_groups()
    with phases.phase("places' nodes asked"):
        cluster.node_ids()
    nowhere = placement_group([{"CPU": 0.001, "no_machine_has_this": 1}])
    builder = StandInBuilder(hosts, nowhere, arguments)
    with phases.phase("group"):
        group = RayWorkerGroup(cluster, builder, sharding_annotations=layout.sharding, name_prefix=f"of{num_workers}")
    slowest = max(start + build for start, build in sleeps.values())
    phases.seconds["- processes requested"] = builder.requested[-1] - builder.requested[0], float("nan")
    phases.seconds["- constructors called"] = builder.called[-1] - builder.called[0], float("nan")
    phases.seconds["- slowest stand-in"] = slowest, 0.0
    phases.seconds["- group without its sleep"] = phases.seconds["group"][0] - slowest, float("nan")
    with phases.phase("a call of all"):
        group.get_all_worker_results(group.run_all_workers_single_data("shares_prompts"))
    with phases.phase("a call with rows"):
        future = group.run_all_workers_sharded_data(
            "train",
            data=[None] * num_workers,
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=list(REPLICATED_AXES),
            return_from_workers=layout.result_ranks,
        )
        group.get_all_worker_results(future)
    with phases.phase("end"):
        group.shutdown(force=True)
        cluster.shutdown()
    remove_placement_group(nowhere)
    for each in hosts:
        ray.kill(each)
    return phases


def _sleeps(num_workers: int, options: argparse.Namespace) -> dict[int, tuple[float, float]]:
    start, build = LogNormal(options.start_s, options.sigma), LogNormal(options.build_s, options.sigma)
    return {rank: (start.draw("start", rank), build.draw("build", rank)) for rank in range(num_workers)}


def _choose(counts: Sequence[int]) -> None:
    """Choose machines as a run on as many machines does."""
    room = {"CPU": 64.0, "GPU": 8.0}
    nodes = [NodeRoom(f"{n:056x}", f"10.0.{n // 256}.{n % 256}", room, room) for n in range(len(counts))]
    assert choose_nodes(counts, {"CPU": 1.0, "GPU": 1.0}, nodes, "STRICT_SPREAD") is not None


def _rank_arguments(layout: ParallelLayout) -> tuple[Any, ...]:
    config = load_config(RECIPE, schema=GRPOMasterConfig).policy
    settings = WorkerSettings(
        backend="nemo_rl.models.megatron.backend.MegatronBackend",
        layout=layout,
        uses_gpu=True,
        num_threads=None,
        ranks_per_node=8,
        collective_timeout_s=3600.0,
        seed=42,
        init_optimizer=True,
        init_reference_model=True,
    )
    return config, settings


def main() -> None:
    """Print the phases of each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--start-s", type=float, default=8.0, help="mean seconds until a process has its imports")
    parser.add_argument("--build-s", type=float, default=5.0, help="mean seconds of a constructor")
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--profile", action="store_true", help="print the driver's functions that take the time")
    options = parser.parse_args()
    init_ray(num_cpus=8, optimizations=[])
    for num_workers in options.workers:
        profiler = cProfile.Profile()
        if options.profile:
            profiler.enable()
        phases = measure(num_workers, options.per_node, options)
        profiler.disable()
        for name, (seconds, processor) in phases.seconds.items():
            shown = "" if processor != processor else f"{processor:10.2f} s of the driver's processor"
            sys.stdout.write(f"{num_workers:6,} workers  {name:28}{seconds:8.2f} s{shown}\n")
        if options.profile:
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumtime").print_stats(45)
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
