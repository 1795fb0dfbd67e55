"""Choose the nodes of a Ray cluster for a set of bundles, or describe what the nodes lack.

`virtual_cluster` reserves places on the chosen nodes. Invariant: the choice depends only on the nodes and their free
resources, and is ordered by address. Ranks are numbered node by node, and a resumed run finds rank 0 on the same node.
"""

import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

NVLINK_DOMAIN_PREFIX = "nvlink_domain_"
"""Prefix of a Ray resource's name that nodes of one NVLink domain have."""
TOPO_RANK_KEY = "topo_rank"
"""Name of a Ray resource with a node's position in the order of the network's topology."""


@dataclass(frozen=True)
class NodeRoom:
    """A living node."""

    node_id: str
    """Ray's id of the node."""
    address: str
    """Address at which other nodes reach it."""
    total: Mapping[str, float]
    """Resources of the node by kind. "CPU" and "GPU" are logical."""
    free: Mapping[str, float]
    """Resources that are free now."""

    @property
    def domain(self) -> str | None:
        """Name of the NVLink domain, from a resource `nvlink_domain_<id>`, or None if the node has no such resource."""
        return next((kind for kind in self.total if kind.startswith(NVLINK_DOMAIN_PREFIX)), None)

    def holds(self, count: int, bundle: Mapping[str, float], *, now: bool = False) -> bool:
        """Return whether `count` bundles fit into the node's total resources or (`now`) into its free resources."""
        have = self.free if now else self.total
        return all(have.get(kind, 0.0) >= count * amount for kind, amount in bundle.items())

    def __str__(self) -> str:
        return f"{self.address}: {self.total.get('CPU', 0):g} CPUs, {self.total.get('GPU', 0):g} GPUs"


def living_nodes() -> list[NodeRoom]:
    """Return the living nodes of the cluster, sorted by address."""
    free = available_resources_per_node()
    nodes = [
        NodeRoom(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (_in_order(node.address), node.node_id))


def choose_nodes(
    counts: Sequence[int],
    bundle: Mapping[str, float],
    nodes: Sequence[NodeRoom],
    strategy: str,
    avoid: Collection[str] = (),
    segment_size: int | None = None,
) -> list[str] | None:
    """Choose a node, preferably with enough free resources, for each entry: bundles that must be on one node.

    Args:
        counts: number of bundles of each entry.
        bundle: resources of one bundle.
        nodes: the nodes, in order of preference.
        strategy: STRICT_SPREAD: each node once; SPREAD: each node once while possible; PACK: few nodes.
        avoid: ids of nodes that must not be used.
        segment_size: number of consecutive entries that must be on different nodes of one NVLink domain; if None, or if
            nodes have no domains, there is no such condition.

    Returns:
        The node id of each entry; None if the nodes' total resources do not suffice.
    """
    if segment_size is not None and any(node.domain for node in nodes):
        return _choose_segments(counts, bundle, [node for node in nodes if node.node_id not in avoid], segment_size)
    entries: dict[str, list[int]] = {node.node_id: [] for node in nodes if node.node_id not in avoid}
    chosen: dict[int, str] = {}
    # # The largest entries are placed first, because a smaller entry fits wherever a larger entry fits.
    for entry in sorted(range(len(counts)), key=lambda entry: -counts[entry]):
        fitting = []
        for position, node in enumerate(nodes):
            if node.node_id not in entries or (strategy == "STRICT_SPREAD" and entries[node.node_id]):
                continue
            taken = sum(entries[node.node_id]) + counts[entry]
            if node.holds(taken, bundle):
                used = len(entries[node.node_id])
                order = -used if strategy == "PACK" else used
                fitting.append((not node.holds(taken, bundle, now=True), order, position, node.node_id))
        if not fitting:
            return None
        chosen[entry] = min(fitting)[-1]
        entries[chosen[entry]].append(counts[entry])
    return [chosen[entry] for entry in range(len(counts))]


def _choose_segments(
    counts: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[NodeRoom], segment_size: int
) -> list[str] | None:
    """Assign nodes of one domain to each segment of entries, in the order of the topology (`choose_nodes`)."""
    largest = max(counts)
    domains: dict[str, list[NodeRoom]] = {}
    for node in sorted(nodes, key=lambda node: node.total.get(TOPO_RANK_KEY, 0.0)):
        if node.domain and node.holds(largest, bundle):
            domains.setdefault(node.domain, []).append(node)
    for members in domains.values():
        members.sort(key=lambda node: not node.holds(largest, bundle, now=True))
    chosen: list[str] = []
    while len(chosen) < len(counts):
        size = min(segment_size, len(counts) - len(chosen))
        fitting = [members for members in domains.values() if len(members) >= size]
        if not fitting:
            return None
        best = min(fitting, key=lambda members: _preference(members, size, segment_size, largest, bundle))
        chosen += [node.node_id for node in best[:size]]
        del best[:size]
    return chosen


def _preference(
    members: Sequence[NodeRoom], size: int, segment_size: int, count: int, bundle: Mapping[str, float]
) -> tuple[bool, int]:
    """Return the sort key of a domain. Free domains come first, and then small domains if the segment is short."""
    is_taken = not all(node.holds(count, bundle, now=True) for node in members[:size])
    return is_taken, len(members) if size < segment_size else 0


def shortage(
    counts: Sequence[int],
    bundle: Mapping[str, float],
    nodes: Sequence[NodeRoom],
    strategy: str,
    avoid: Collection[str] = (),
    segment_size: int | None = None,
) -> str:
    """Describe the nodes' resources and too small nodes in one line, from the arguments of `choose_nodes`."""
    described = []
    for node in nodes:
        notes = []
        if node.node_id in avoid:
            notes.append("taken by other workers of this run")
        elif not node.holds(min(counts), bundle):
            notes.append(f"too small for {min(counts)} bundle{'s' * (min(counts) > 1)}")
        elif not node.holds(min(counts), bundle, now=True):
            notes.append(f"free now: {node.free.get('CPU', 0):g} CPUs, {node.free.get('GPU', 0):g} GPUs")
        described.append(f"{node}{f' ({notes[0]})' if notes else ''}")
    large_enough = sum(node.holds(max(counts), bundle) for node in nodes if node.node_id not in avoid)
    domains = Counter(node.domain for node in nodes if node.domain and node.node_id not in avoid)
    if segment_size is not None and domains:
        sizes = ", ".join(f"{name} has {number}" for name, number in domains.items())
        described.append(
            f"cluster.segment_size={segment_size} needs as many nodes of one NVLink domain for each segment; {sizes}"
        )
    missing = len(counts) - large_enough if strategy == "STRICT_SPREAD" else 0
    lacks = f" {missing} node{'s' * (missing > 1)} of that size missing." if missing > 0 else ""
    return f"The nodes have: {'; '.join(described)}.{lacks}"


def _in_order(address: str) -> tuple[int, str]:
    """Return a sort key: IP addresses by number, followed by host names."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 128, address
