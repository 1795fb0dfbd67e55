"""Start or join Ray, and reserve the places of worker processes.

A run calls `init_ray` once and makes a `RayVirtualCluster` for each set of machines; `worker_groups` puts one worker
into each reserved bundle. Invariant: a local Ray serves this run only, on loopback addresses; another one is joined
only when RAY_ADDRESS says so.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.local_ray import LOOPBACK, local_ray_has_died, start_local_ray
from nemo_rl.distributed.rendezvous import bind_free_port
from nemo_rl.utils.errors import ResourceInsufficientError
from nemo_rl.utils.public_names import public_names
from nemo_rl.utils.stop_signals import handlers_kept

logger = logging.getLogger(__name__)
__getattr__ = public_names(__name__, {"PY_EXECUTABLES": "nemo_rl.utils.venvs"})

_RESERVE_TIMEOUT_S = 5.0
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Under `uv run` Ray would build the whole environment again for each worker, from the driver's
    # command line; the workers use the driver's interpreter instead.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# A joined cluster was started with its own environment; these of the driver's count for workers.
_FORWARDED_PREFIXES = ("HF_", "NRL_", "NCCL_", "VLLM_", "TORCH", "WANDB_", "MLFLOW_", "TOKENIZERS_")


@handlers_kept()  # Ray aborts on SIGTERM, by a handler below Python's.
def init_ray(
    log_dir: str | None = None,
    *,
    num_cpus: int | None = None,
    env_vars: Mapping[str, str] | None = None,
    include_dashboard: bool = False,
    log_to_driver: bool = False,
) -> None:
    """Connect this process to Ray; does nothing when it is connected already.

    With RAY_ADDRESS set (an address, or `auto` to find the cluster on this machine) that cluster is
    joined. Otherwise a local one starts, reachable under 127.0.0.1, and ends with this process.

    Args:
        log_dir: gets a link `ray_session` to Ray's session folder, which holds the workers' logs.
        num_cpus: logical CPUs of a local cluster; None counts the machine's.
        env_vars: environment of all workers, on top of this process's own.
        include_dashboard: start Ray's dashboard with a local cluster.
        log_to_driver: repeat what workers write on this process's console.
    """
    if ray.is_initialized():
        return
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray warns on every start that its token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ray read this one when it was imported.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = ray_constants.env_bool("RAY_ENABLE_UV_RUN_RUNTIME_ENV", False)
    address = os.environ.get("RAY_ADDRESS")
    context: Any
    if address:
        forwarded = {k: v for k, v in os.environ.items() if k.startswith(_FORWARDED_PREFIXES)}
        worker_env = {**forwarded, **(env_vars or {})}
        context = ray.init(
            address=address,
            runtime_env={"env_vars": worker_env},
            log_to_driver=log_to_driver,
            logging_level=logging.WARNING,
        )
    else:
        context = start_local_ray(
            num_cpus=num_cpus,
            env_vars=env_vars or {},
            include_dashboard=include_dashboard,
            log_to_driver=log_to_driver,
        )
    session_dir = Path(context.address_info["session_dir"])
    logger.info("Ray %s; worker logs in %s", address or "started locally", session_dir / "logs")
    if log_dir is not None and session_dir.exists():
        _link_session(Path(log_dir), session_dir)


class RayVirtualCluster:
    """Reserved bundles of resources, one bundle for each rank.

    Bundles of one node entry always share a node. Places are reserved on first use.

    Args:
        bundle_ct_per_node_list: number of bundles for each node entry.
        use_gpus: whether each bundle holds one GPU.
        max_colocated_worker_groups: how many worker groups share the bundles; each takes a fraction.
        num_gpus_per_node: GPUs of a node; a node entry may not ask for more.
        name: shows in Ray's tools.
        placement_group_strategy: `SPREAD` or `PACK` leave it to Ray which nodes the entries share;
            `STRICT_SPREAD` insists on a node of its own for each entry.
        port_range_low: first port at which a group's processes may meet; None leaves it to the
            operating system.
        port_range_high: last such port.
        cpus_per_bundle: logical CPUs of a bundle; None takes 1, or less so that the bundles leave
            three quarters of their node's CPUs to environments and other clusters. Ray only counts
            them; a process may use more.

    Raises:
        ValueError: unknown strategy, empty bundle list, or more GPUs than a node has.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        cpus_per_bundle: float | None = None,
    ) -> None:
        strategies = ("SPREAD", "PACK", "STRICT_SPREAD")
        if placement_group_strategy not in strategies:
            raise ValueError(f"placement_group_strategy must be one of {strategies}, got {placement_group_strategy!r}.")
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise ValueError(
                f"bundle_ct_per_node_list needs at least one bundle for each node, got {bundle_ct_per_node_list}."
            )
        if use_gpus and max(bundle_ct_per_node_list) > num_gpus_per_node:
            raise ValueError(
                f"bundle_ct_per_node_list={bundle_ct_per_node_list} asks for more GPUs on a node "
                f"than num_gpus_per_node={num_gpus_per_node}."
            )
        self._bundle_counts = list(bundle_ct_per_node_list)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self._strategy = placement_group_strategy
        self.port_range = (port_range_low, port_range_high)
        self._cpus_per_bundle = cpus_per_bundle
        self._placement_groups: list[PlacementGroup] | None = None
        # Colocated groups may be started from two threads.
        self._reserving = threading.Lock()

    @property
    def bundle_counts(self) -> list[int]:
        """Number of bundles for each node entry."""
        return list(self._bundle_counts)

    def world_size(self) -> int:
        """Number of bundles."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        """Number of node entries."""
        return len(self._bundle_counts)

    def cpus_per_bundle(self) -> float:
        """Logical CPUs of each bundle."""
        if self._cpus_per_bundle is not None:
            return self._cpus_per_bundle
        node_cpus = max((cpus for _, cpus, _ in _node_resources()), default=0.0)
        share = node_cpus / (4 * max(self._bundle_counts))
        return min(1.0, int(share * 1000) / 1000)

    def resources_per_worker(self) -> dict[str, float]:
        """What one worker of a group takes of its bundle, as Ray actor options."""
        groups = self.max_colocated_worker_groups
        cpus = int(self.cpus_per_bundle() / groups * 1000) / 1000
        return {"num_cpus": cpus, "num_gpus": 1 / groups if self.use_gpus else 0}

    def get_placement_groups(self) -> list[PlacementGroup]:
        """One placement group for each node entry, reserved on the first call.

        Tries again NRL_VIRTUAL_CLUSTER_MAX_RETRIES times (6), waiting 1, 2, 4 ... seconds longer each
        time, because nodes may still be joining and earlier workers may still be leaving.

        Raises:
            ResourceInsufficientError: the cluster does not have what is asked for.
        """
        with self._reserving:
            if self._placement_groups is None:
                self._placement_groups = self._reserve()
            return self._placement_groups

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Address of a bundle's node and a port that is free there now, and perhaps not for long.

        A `RayWorkerGroup` does not ask: its rank 0 holds the port of its meeting point (`rendezvous`).

        Raises:
            ResourceInsufficientError: no port of the range is free.
        """
        group = self.get_placement_groups()[pg_idx]
        node_id = placement_group_table(group)["bundles_to_node_id"][bundle_idx]
        if node_id == ray.get_runtime_context().get_node_id():
            return _address_and_free_port(*self.port_range)
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_idx)
        probe = ray.remote(num_cpus=0)(_address_and_free_port)
        return ray.get(probe.options(scheduling_strategy=where).remote(*self.port_range), timeout=60.0)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there now; a fresh port each time."""
        return self.get_available_address_and_port(0, 0)

    def shutdown(self) -> bool:
        """Give the reserved places back; workers in them are killed by Ray.

        Returns:
            Whether there was anything to give back.
        """
        groups, self._placement_groups = self._placement_groups, None
        if groups is None or not ray.is_initialized() or local_ray_has_died():
            return False
        for group in groups:
            remove_placement_group(group)
        return True

    def _reserve(self) -> list[PlacementGroup]:
        if self._exceeds_local_machine():
            raise ResourceInsufficientError(self._lacks())
        attempts = 1 + int(os.environ.get("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "6"))
        for attempt in range(attempts):
            groups = self._try_reserve(_RESERVE_TIMEOUT_S + 2.0**attempt)
            if groups is not None:
                return groups
            logger.warning("%s Attempt %d of %d.", self._lacks(), attempt + 1, attempts)
        raise ResourceInsufficientError(self._lacks())

    def _try_reserve(self, timeout_s: float) -> list[PlacementGroup] | None:
        bundle = {"CPU": self.cpus_per_bundle()} | ({"GPU": 1.0} if self.use_gpus else {})
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0} or {"CPU": 0.001}
        unique = f"{self.name or 'cluster'}-{uuid.uuid4().hex[:8]}"
        groups = [
            placement_group([bundle] * count, strategy="STRICT_PACK", name=f"{unique}-{entry}")
            for entry, count in enumerate(self._bundle_counts)
        ]
        end = time.monotonic() + timeout_s
        if all(group.wait(max(end - time.monotonic(), 0.0)) for group in groups):
            nodes = {placement_group_table(g)["bundles_to_node_id"][0] for g in groups}
            if self._strategy != "STRICT_SPREAD" or len(nodes) == len(groups):
                return groups
        for group in groups:
            remove_placement_group(group)
        return None

    def _exceeds_local_machine(self) -> bool:
        """Whether waiting is in vain: a local Ray has one node, and it is too small."""
        nodes = _node_resources()
        if [address for address, _, _ in nodes] != [LOOPBACK]:
            return False
        _, cpus, gpus = nodes[0]
        needed_gpus = self.world_size() if self.use_gpus else 0
        return self.world_size() * self.cpus_per_bundle() > cpus or needed_gpus > gpus

    def _lacks(self) -> str:
        per_bundle = f"{self.cpus_per_bundle():g} CPUs" + (" and 1 GPU" if self.use_gpus else "")
        nodes = "; ".join(f"{address}: {cpus:g} CPUs, {gpus:g} GPUs" for address, cpus, gpus in _node_resources())
        free = ray.available_resources()
        return (
            f"Cluster {self.name!r} asks for {self._bundle_counts} bundles per node "
            f"({self._strategy}), each with {per_bundle}. The nodes have: {nodes}. "
            f"Not taken by others now: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs."
        )


def _node_resources() -> list[tuple[str, float, float]]:
    """Address, CPUs and GPUs of each node that is alive."""
    return sorted(
        (
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def _address_and_free_port(low: int | None, high: int | None) -> tuple[str, int]:
    with bind_free_port(ray.util.get_node_ip_address(), low, high) as bound:
        return bound.getsockname()


def _link_session(log_dir: Path, session_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    link = log_dir / "ray_session"
    link.unlink(missing_ok=True)
    link.symlink_to(session_dir)
