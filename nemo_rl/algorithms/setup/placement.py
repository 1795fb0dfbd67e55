"""Which bundles of the Ray cluster each worker group of a run gets.

Invariant: sizes and placement follow from `cluster` and the sections of the models alone (`config.rules.topology`).
"""

from collections.abc import Mapping, Sequence

from nemo_rl.config import ClusterConfig, PolicyConfig, TeacherConfig, plan_topology, students_share, teachers_share
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster


def place_roles(cluster: ClusterConfig, roles: Mapping[str, PolicyConfig]) -> dict[str, RayVirtualCluster]:
    """Bundles for every model and for "generation"; the same object where they share.

    Args:
        cluster: the machines.
        roles: sections of the models by name; "policy" says where generation runs; another one shares the policy's
            devices, unless it has a key `colocated` that says otherwise.
    """
    places: dict[str, RayVirtualCluster] = {}
    left = cluster
    for name, section in roles.items():
        if isinstance(section, TeacherConfig) and not shares_with_policy(section):
            share = teachers_share(cluster, section.colocated)
            places[name] = _reserve(share, name, share.num_nodes, share.policy_ranks_per_node, 1)
            left = students_share(left, section.colocated)
    guests = roles.keys() - places.keys() - {"policy"}
    apart = list(places.values()) if left.num_nodes < cluster.num_nodes else []
    places["policy"], places["generation"] = make_clusters(left, roles["policy"], len(guests), apart)
    return places | dict.fromkeys(guests, places["policy"])


def shares_with_policy(section: PolicyConfig) -> bool:
    """Whether a model gets the policy's devices; the policy itself does."""
    return not isinstance(section, TeacherConfig) or section.colocated.enabled


def make_clusters(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    guests: int = 0,
    apart_from: Sequence[RayVirtualCluster] = (),
) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Bundles for policy and generation; the same ones twice when they are colocated or nothing is generated.

    Args:
        cluster: the machines.
        policy: says where generation runs.
        guests: further worker groups that will share the policy's bundles.
        apart_from: clusters whose machines are not for policy and generation.
    """
    topology = plan_topology(cluster, policy)
    nodes, per_node = topology.policy_nodes, topology.policy_ranks_per_node
    if policy.generation is None:
        alone = _reserve(cluster, "policy", nodes, per_node, 1 + guests, apart_from)
        return alone, alone
    if policy.generation.colocated.enabled:
        shared = _reserve(cluster, "policy_and_generation", nodes, per_node, 2 + guests, apart_from)
        return shared, shared
    trains = _reserve(cluster, "policy", nodes, per_node, 1 + guests, apart_from)
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
        apart_from=apart_from,
    )
