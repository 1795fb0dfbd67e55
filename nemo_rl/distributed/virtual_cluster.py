"""Start or join Ray, and reserve the places of worker processes.

A run calls `init_ray` once and makes a `RayVirtualCluster` for each set of machines. `worker_groups` starts one worker
in each reserved bundle. Invariants: a local Ray serves only this run, on loopback addresses. An existing cluster is
joined only if RAY_ADDRESS names it.
"""

import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
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

from nemo_rl.compat.public_names import public_names
from nemo_rl.distributed.cluster.address import require_cluster
from nemo_rl.distributed.cluster.joined_ray import join_ray
from nemo_rl.distributed.cluster.local_ray import LOOPBACK, local_ray_has_died, start_local_ray
from nemo_rl.distributed.cluster.node_choice import NodeRoom, choose_nodes, living_nodes, shortage
from nemo_rl.distributed.cluster.node_health import lost_nodes
from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.host.terminal import is_terminal
from nemo_rl.optimizations.switch import Choice
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ResourceInsufficientError

logger = logging.getLogger(__name__)
__getattr__ = public_names(__name__, {"PY_EXECUTABLES": "nemo_rl.utils.venvs"})

_RESERVE_TIMEOUT_S = 5.0
_NOTICE_TIMEOUT_S = 90.0
"""Seconds after which a lost node is noticed. They exceed the duration of Ray's health checks."""
_RESCHEDULE_TIMEOUT_S = 20.0
"""Seconds after that within which bundles are moved. Ray moves them immediately if there is room."""
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # # Under `uv run`, Ray would build the whole environment again for each worker, from the driver's command line.
    # Workers use the driver's interpreter instead.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# # A joined cluster has its own environment, so these variables of the driver are sent to its workers. Everyone on the
# cluster can read them. Therefore no prefix here matches names that usually hold secrets, except those of trackers and
# the hub. Devices and threads (CUDA_VISIBLE_DEVICES, OMP_*) are chosen for each worker.
_FORWARDED_PREFIXES = (
    "HF_", "NRL_", "NEMO_RL_", "VLLM_", "TORCH", "PYTORCH_", "TOKENIZERS_", "TRANSFORMERS_", "SAFETENSORS_",
    "NCCL_", "GLOO_", "TENSORPIPE_", "UCX_", "FI_", "OFI_", "NVSHMEM_", "SHARP_", "GDRCOPY_",
    "NVTE_", "NVIDIA_TF32_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "CUDA_MODULE_",
    "CUDA_CACHE_", "CUDA_DISABLE_", "CUDA_FORCE_", "CUDA_HOME", "CUDA_ENABLE_",
    "TRITON_", "FLASHINFER_", "FLASH_ATTENTION_", "DG_", "DEEP_EP_",
    "WANDB_", "MLFLOW_", "SWANLAB_",
)  # fmt: skip


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables for the workers of a joined cluster."""
    return {name: value for name, value in environment.items() if name.startswith(_FORWARDED_PREFIXES)}


def init_ray(
    log_dir: str | None = None,
    *,
    num_cpus: int | None = None,
    env_vars: Mapping[str, str] | None = None,
    include_dashboard: bool = False,
    log_to_driver: bool = False,
    optimizations: Choice = "auto",
) -> None:
    """Connect this process to Ray, unless it is already connected.

    If RAY_ADDRESS is set (an address, or `auto` to find the cluster on this machine), join that cluster. Otherwise
    start a local Ray on 127.0.0.1, which ends with this process.

    Args:
        log_dir: folder for a link `ray_session` to Ray's session folder, which holds the workers' logs.
        num_cpus: logical CPUs of a local cluster; if None, the CPUs of the machine.
        env_vars: environment of all workers, in addition to that of this process.
        include_dashboard: start Ray's dashboard with a local cluster.
        log_to_driver: show the workers' output on this process's console.
        optimizations: value of `cluster.optimizations`, for a local cluster.

    Raises:
        ConfigError: no Ray cluster answers at RAY_ADDRESS.
        DeadlineExceededError: Ray did not connect in time.
        ResourceInsufficientError: a local Ray did not start.
    """
    if ray.is_initialized():
        return
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if not is_terminal(sys.stderr):
        _without_colours()
    # # Ray warns at every start that its token authentication is on, which is intended.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # # Ray reads this variable on import, so its stored value is changed too.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = ray_constants.env_bool("RAY_ENABLE_UV_RUN_RUNTIME_ENV", False)
    address = cluster_address()
    context: Any
    if address:
        require_cluster()
        worker_env = {**forwarded_environment(os.environ), **(env_vars or {})}
        context = join_ray(address, worker_env, log_to_driver=log_to_driver)
    else:
        context = start_local_ray(
            num_cpus=num_cpus,
            env_vars=env_vars or {},
            include_dashboard=include_dashboard,
            log_to_driver=log_to_driver,
            optimizations=optimizations,
        )
    session_dir = Path(context.address_info["session_dir"])
    logger.info("Ray %s; worker logs in %s", address or "started locally", session_dir / "logs")
    if log_dir is not None and session_dir.exists():
        _link_session(Path(log_dir), session_dir)


class RayVirtualCluster:
    """Reserved bundles of resources, one bundle per rank.

    Bundles of a node entry are always on the same node. Entries are on nodes in the order of their addresses
    (`node_choice`). Places are reserved at the first use.

    Args:
        bundle_ct_per_node_list: number of bundles for each node entry.
        use_gpus: whether each bundle holds one GPU.
        max_colocated_worker_groups: number of worker groups that share the bundles; each gets a fraction.
        num_gpus_per_node: GPUs of a node; a node entry may not request more.
        name: name shown in Ray's tools.
        placement_group_strategy: `STRICT_SPREAD` requires a separate node for each entry, `SPREAD` shares nodes only if
            there are too few, `PACK` uses as few as possible.
        port_range_low: first port for a process group's store; if None, the operating system chooses.
        port_range_high: last port for it.
        cpus_per_bundle: logical CPUs of a bundle; if None, 1, or less to leave three quarters of the node's CPUs to
            environments and other clusters. Ray only counts them. A process may use more.
        segment_size: consecutive node entries that must be in one NVLink domain (`choose_nodes`).
        apart_from: clusters whose nodes this cluster does not use.

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
        *,
        segment_size: int | None = None,
        apart_from: "Sequence[RayVirtualCluster]" = (),
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
                f"bundle_ct_per_node_list={bundle_ct_per_node_list} requests more GPUs on a node "
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
        self._segment_size = segment_size
        self._apart_from = tuple(apart_from)
        self._placement_groups: list[PlacementGroup] | None = None
        self.compare_new_nodes: Callable[[], None] | None = None
        """Function that is called after Ray has moved bundles to other nodes. `node_checks` sets it."""
        # Two threads may start colocated groups at the same time.
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
        """Return the logical CPUs of each bundle. They are final when places are reserved."""
        return self._cpus_of(living_nodes()) if self._cpus_per_bundle is None else self._cpus_per_bundle

    def _cpus_of(self, nodes: Sequence[NodeRoom]) -> float:
        """Return the CPUs per bundle with which the bundles fit on the largest nodes."""
        if self._cpus_per_bundle is not None:
            return self._cpus_per_bundle
        cpus = sorted((node.total.get("CPU", 0.0) for node in nodes), reverse=True) or [0.0]
        share = cpus[min(len(self._bundle_counts), len(cpus)) - 1] / (4 * max(self._bundle_counts))
        return min(1.0, int(share * 1000) / 1000)

    def resources_per_worker(self) -> dict[str, float]:
        """Return a worker's share of its bundle, as Ray actor options."""
        groups = self.max_colocated_worker_groups
        cpus = int(self.cpus_per_bundle() / groups * 1000) / 1000
        return {"num_cpus": cpus, "num_gpus": 1 / groups if self.use_gpus else 0}

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return one placement group per node entry. The first call reserves them.

        A shortage is logged immediately. Then reserving is tried again NRL_VIRTUAL_CLUSTER_MAX_RETRIES times (default
        6), after 1, 2, 4 ... seconds, because nodes may still be joining and earlier workers may still be ending.

        Raises:
            ResourceInsufficientError: the cluster lacks the requested resources.
        """
        with self._reserving:
            if self._placement_groups is None:
                self._placement_groups = self._reserve()
            return self._placement_groups

    def node_ids(self) -> list[str]:
        """Return Ray's id of each node entry's node."""
        return _nodes_of(self.get_placement_groups())

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Return the address of a bundle's node, and a port that is free now and may be taken later.

        A `RayWorkerGroup` does not use this: its rank 0 holds the port of the group's store (`rendezvous`).

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
        """Return the address of rank 0's node, and a port that is free now. Each call returns a new port."""
        return self.get_available_address_and_port(0, 0)

    def shutdown(self) -> bool:
        """Release the reserved places. Ray then kills the workers in them.

        Returns:
            Whether any places were reserved.
        """
        groups, self._placement_groups = self._placement_groups, None
        if groups is None or not ray.is_initialized() or local_ray_has_died():
            return False
        for group in groups:
            remove_placement_group(group)
        return True

    def await_places(self, node_idxs: Collection[int]) -> None:
        """Wait until Ray has moved the bundles of lost nodes to other nodes.

        Raises:
            ResourceInsufficientError: no other node has room for them.
            ConfigError, DeadlineExceededError: the new node lacks something (`node_checks.check_nodes`).
        """
        groups = self.get_placement_groups()
        end = time.monotonic() + _NOTICE_TIMEOUT_S
        for group in (groups[idx] for idx in node_idxs):
            while True:
                table = placement_group_table(group)
                is_placed = table["state"] == "CREATED"
                # # Until its health checks have failed, Ray would start a worker on the lost node.
                if is_placed and not lost_nodes(table["bundles_to_node_id"].values()):
                    break
                now = time.monotonic()
                end = end if is_placed else min(end, now + _RESCHEDULE_TIMEOUT_S)
                if now > end:
                    raise ResourceInsufficientError(f"A node was lost, and no other has room. {self._lacks()}")
                time.sleep(0.2)
        if self.compare_new_nodes is not None:
            self.compare_new_nodes()

    def _reserve(self) -> list[PlacementGroup]:
        attempts = 1 + int(os.environ.get("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "6"))
        for attempt in range(attempts):
            nodes = living_nodes()
            bundle = self._bundle(nodes)
            chosen = choose_nodes(
                self._bundle_counts, bundle, nodes, self._strategy, self._avoided(), self._segment_size
            )
            groups = self._try_reserve(chosen, bundle) if chosen else None
            if groups is not None:
                self._cpus_per_bundle = self._cpus_of(nodes)
                return groups
            # A local Ray has one node, and no other will join.
            if (chosen is None and [node.address for node in nodes] == [LOOPBACK]) or attempt == attempts - 1:
                break
            logger.warning("%s Attempt %d of %d; waiting %d s.", self._lacks(), attempt + 1, attempts, 2**attempt)
            time.sleep(2.0**attempt)
        raise ResourceInsufficientError(self._lacks())

    def _bundle(self, nodes: Sequence[NodeRoom]) -> dict[str, float]:
        bundle = {"CPU": self._cpus_of(nodes), "GPU": 1.0 if self.use_gpus else 0.0}
        return {kind: amount for kind, amount in bundle.items() if amount > 0} or {"CPU": 0.001}

    def _avoided(self) -> set[str]:
        """Return the ids of nodes that other clusters use and this cluster must not use."""
        return {node for other in self._apart_from for node in other.node_ids()}

    def _try_reserve(self, nodes: Sequence[str], bundle: dict[str, float]) -> list[PlacementGroup] | None:
        unique = f"{self.name or 'cluster'}-{uuid.uuid4().hex[:8]}"
        groups = [
            # # The node is only a soft target, so that Ray may move the bundles after a loss of the node.
            placement_group([bundle] * count, "STRICT_PACK", f"{unique}-{entry}", _soft_target_node_id=node)
            for entry, (count, node) in enumerate(zip(self._bundle_counts, nodes, strict=True))
        ]
        end = time.monotonic() + _RESERVE_TIMEOUT_S
        if all(group.wait(max(end - time.monotonic(), 0.0)) for group in groups):
            placed = _nodes_of(groups)
            is_apart = self._avoided().isdisjoint(placed)
            if is_apart and (self._strategy != "STRICT_SPREAD" or len(set(placed)) == len(groups)):
                return groups
        for group in groups:
            remove_placement_group(group)
        return None

    def _lacks(self) -> str:
        nodes = living_nodes()
        bundle = self._bundle(nodes)
        per_bundle = f"{bundle.get('CPU', 0):g} CPUs" + (" and 1 GPU" if self.use_gpus else "")
        wanted = (
            f"Cluster {self.name!r} requests {self._bundle_counts} bundles per node ({self._strategy}), each with "
            f"{per_bundle}."
        )
        lacks = shortage(self._bundle_counts, bundle, nodes, self._strategy, self._avoided(), self._segment_size)
        return f"{wanted} {lacks}"


def _nodes_of(groups: Sequence[PlacementGroup]) -> list[str]:
    """Return the node id of each placement group."""
    return [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]


def _address_and_free_port(low: int | None, high: int | None) -> tuple[str, int]:
    with bind_free_port(ray.util.get_node_ip_address(), low, high) as bound:
        host, taken, *_ = bound.getsockname()
        return host, taken


def _without_colours() -> None:
    """Remove colours from the lines that Ray prints for daemons and workers, because they are written to a file."""
    colorama = ray._private.worker.colorama  # bundled with Ray
    for codes in (colorama.Fore, colorama.Style):
        for name in vars(codes):
            setattr(codes, name, "")


def _link_session(log_dir: Path, session_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    link = log_dir / "ray_session"
    link.unlink(missing_ok=True)
    link.symlink_to(session_dir)
