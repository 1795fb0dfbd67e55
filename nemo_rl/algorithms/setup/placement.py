"""Give each worker group of a run its bundles of the Ray cluster.

Invariant: sizes and placement follow from `cluster` and the sections of the models alone (`rules.placement.topology`).
"""

from collections.abc import Mapping, Sequence

from nemo_rl.config import ClusterConfig, PolicyConfig, Role, divide_cluster, plan_topology, sharing
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster


def place_models(cluster: ClusterConfig, models: Mapping[str, Role]) -> dict[str, RayVirtualCluster]:
    """Give bundles to every model and to "generation"; models that share devices get the same object.

    Args:
        cluster: the machines.
        models: the models of the run; "policy" says where generation runs.
    """
    parts, groups = divide_cluster(cluster, models), sharing(models)
    places: dict[str, RayVirtualCluster] = {}
    for owner in (name for name in groups if name != "policy"):
        part = parts[owner]
        places[owner] = _reserve(part, owner, part.num_nodes, part.policy_ranks_per_node, len(groups[owner]))
    apart = list(places.values()) if parts["policy"].num_nodes < cluster.num_nodes else []
    num_sharing = len(groups["policy"]) - 1
    places["policy"], generation = make_clusters(parts["policy"], models["policy"].section, num_sharing, apart)
    places |= {name: places[owner] for owner, names in groups.items() for name in names}
    return {**places, "generation": generation}


def make_clusters(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    num_sharing: int = 0,
    apart_from: Sequence[RayVirtualCluster] = (),
) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Return the bundles for policy and for generation; the same object if they are colocated or nothing is sampled.

    Args:
        cluster: the machines.
        policy: says where generation runs.
        num_sharing: further worker groups that will share the policy's bundles.
        apart_from: clusters whose machines policy and generation must not use.
    """
    topology = plan_topology(cluster, policy)
    nodes, per_node = topology.policy_nodes, topology.policy_ranks_per_node
    if policy.generation is None:
        alone = _reserve(cluster, "policy", nodes, per_node, 1 + num_sharing, apart_from)
        return alone, alone
    if policy.generation.colocated.enabled:
        shared = _reserve(cluster, "policy_and_generation", nodes, per_node, 2 + num_sharing, apart_from)
        return shared, shared
    trains = _reserve(cluster, "policy", nodes, per_node, 1 + num_sharing, apart_from)
    if topology.generation_nodes + nodes <= cluster.num_nodes:
        apart_from = [*apart_from, trains]
    engines, per_node = topology.generation_nodes, topology.generation_ranks_per_node
    return trains, _reserve(cluster, "generation", engines, per_node, 1, apart_from)


def _reserve(
    cluster: ClusterConfig,
    name: str,
    nodes: int,
    per_node: int,
    groups: int,
    apart_from: Sequence[RayVirtualCluster] = (),
) -> RayVirtualCluster:
    return RayVirtualCluster(
        [per_node] * nodes,
        use_gpus=cluster.uses_gpu,
        max_colocated_worker_groups=groups,
        num_gpus_per_node=max(cluster.gpus_per_node, 1),
        name=name,
        placement_group_strategy="STRICT_SPREAD",
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
        segment_size=cluster.segment_size,
        apart_from=apart_from,
    )
