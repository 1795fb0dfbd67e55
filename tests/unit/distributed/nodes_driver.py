"""Run the driver of `test_several_nodes` as a separate process, because a process joins one Ray only.

It writes what it finds as JSON, and asks on its output to have a node killed.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.setup.roles import make_clusters
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.cluster import node_checks
from nemo_rl.distributed.cluster.node_checks import Shared, check_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.utils.errors import NemoRLError

ENV = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
ADDRESSES = ("127.0.0.2", "127.0.0.3")


def refusal(work: Any) -> str:
    """Return the text of the error that refuses a call."""
    try:
        work()
    except NemoRLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def address_of(clusters: list[RayVirtualCluster]) -> list[list[str]]:
    by_id = {node.node_id: node.address for node in virtual_cluster.living_nodes()}
    return [[by_id[id_] for id_ in cluster.node_ids()] for cluster in clusters]


def reserved(*clusters: RayVirtualCluster) -> list[list[str]]:
    """Return the reserved addresses of the nodes of clusters and release them."""
    found = address_of(list(clusters))
    for cluster in clusters:
        cluster.shutdown()
    return found


def placements() -> dict[str, Any]:
    section = PolicyConfig.build(
        model_name="m", generation={"colocated": {"enabled": False, "resources": {"num_nodes": 1}}}
    )
    apart = make_clusters(ClusterConfig.build(device="cpu", num_nodes=2), section)
    section.generation.colocated.resources.num_nodes = None  # type: ignore[union-attr]
    together = make_clusters(ClusterConfig.build(device="cpu", num_nodes=2), section)
    os.environ["NRL_VIRTUAL_CLUSTER_MAX_RETRIES"] = "1"
    three = RayVirtualCluster([1, 1, 1], use_gpus=False, placement_group_strategy="STRICT_SPREAD", name="three")
    return {
        "spread": [reserved(RayVirtualCluster([1, 1], use_gpus=False)) for _ in range(2)],
        "packed": reserved(RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="PACK")),
        "gpus": reserved(RayVirtualCluster([2, 1]), RayVirtualCluster([1])),
        "apart": reserved(*apart),
        "together": reserved(*together),
        "three": refusal(three.get_placement_groups),
    }


def checks(places: RayVirtualCluster) -> dict[str, str]:
    # Each process has its own working directory, as each machine has its own disks.
    own, everyones = Path("/proc/self/cwd/only_here"), Path.cwd() / "shared"
    own.mkdir()
    same = Shared({"policy.model_name": str(Path.cwd()), "hub": "owner/name"}, ("checkpoint_dir", str(everyones)))
    found = {"same": refusal(lambda: check_nodes([places], same)), "left": sorted(map(str, everyones.iterdir()))}
    node_checks._VISIBLE_S = 0.5
    other = Shared({"policy.model_name": str(own)}, ("checkpoint_dir", str(own)))
    found["other"] = refusal(lambda: check_nodes([places], other))
    code = node_checks._code
    node_checks._code = lambda: "1.0 (code abc, in /opt)"
    found["code"] = refusal(lambda: check_nodes([places], same))
    # Move a bundle away from the driver's node, as Ray may do.
    moved = RayVirtualCluster([1], use_gpus=False)
    found["not_moved"] = refusal(lambda: check_nodes([moved], same)) + refusal(lambda: moved.await_places([0]))
    moved.node_ids = lambda: places.node_ids()[1:]  # type: ignore[method-assign]
    found["moved"] = refusal(lambda: moved.await_places([0]))
    moved.shutdown()
    node_checks._code = code
    return found


def group(cluster: RayVirtualCluster, name: str, ranks_per_unit: int | None) -> RayWorkerGroup:
    builder = RayWorkerBuilder("sample_workers.Plain")
    return RayWorkerGroup(
        cluster, builder, name_prefix=name, env_vars=ENV, setup_timeout_s=90, ranks_per_unit=ranks_per_unit
    )


def loss(policy: RayWorkerGroup, engines: RayWorkerGroup, large: RayVirtualCluster) -> dict[str, Any]:
    large.get_placement_groups()
    killed = Path("killed")
    waits = policy.run_all_workers_single_data("break_once_there", str(killed.absolute()))
    polls = engines.run_single_worker_single_data("hang_on", 1, 1)
    print(f"KILL {ADDRESSES[1]} {killed.absolute()}", flush=True)
    start = time.monotonic()
    found = {"policy": refusal(lambda: policy.get_all_worker_results(waits, 60, "training"))}
    found["policy_s"] = time.monotonic() - start
    found["engine"] = refusal(lambda: engines.get_worker_result(polls, 1, 60, "generation"))
    found["in_vain"] = refusal(lambda: engines.restart_workers([1], 60))
    policy.shutdown(force=True)
    engines.restart_workers([1], 60)
    found["moved_to"] = engines.worker_metadata[1]["node_ip"]
    virtual_cluster._RESCHEDULE_TIMEOUT_S = 1.0
    found["no_room"] = refusal(lambda: large.await_places([0, 1]))
    return found


def loss_of_own_node(engines: RayWorkerGroup) -> dict[str, Any]:
    waits = engines.run_single_worker_single_data("stuck_in_c", 0)
    print(f"KILL {ADDRESSES[0]} {Path('killed_too').absolute()}", flush=True)
    start = time.monotonic()
    return {
        "own": refusal(lambda: engines.get_worker_result(waits, 0, 60, "generation")),
        "own_s": time.monotonic() - start,
    }


def main(results: Path) -> None:
    init_ray()
    found: dict[str, Any] = placements()
    places = RayVirtualCluster([2, 1], use_gpus=False)
    policy = group(places, "policy", None)
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
    asked = policy.run_all_workers_single_data("environment", *names)
    found["environment"] = [[env[name] for name in names] for env in policy.get_all_worker_results(asked)]
    found["where"] = [worker["node_ip"] for worker in policy.worker_metadata]
    found |= checks(places)
    engines = group(RayVirtualCluster([1, 1], use_gpus=False), "engine", 1)
    found |= loss(policy, engines, RayVirtualCluster([1, 1], use_gpus=False, cpus_per_bundle=8))
    found |= loss_of_own_node(engines)
    results.write_text(json.dumps(found))
    os._exit(0)  # The cleanup of Ray would wait for its node.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
