"""Divide a cluster between the policy and engines with their own GPUs, and find how many GPUs a run needs.

Invariant: a cluster is divided as `plan_topology` expects: one machine by GPUs, several by machines.
"""

from collections.abc import Iterator
from typing import Any

from nemo_rl.config import MasterConfig
from nemo_rl.sizing.jobs import Job, with_values
from nemo_rl.sizing.machines import Gpu
from nemo_rl.sizing.proposal import Proposal, propose
from nemo_rl.sizing.search import Search
from nemo_rl.utils.errors import ConfigError

_COLOCATED = "policy.generation.colocated"
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_GPUS_OF_A_MACHINE = 8


def colocated(config: MasterConfig, gpu: Gpu) -> Proposal | None:
    """Propose sizes for engines on the GPUs of the policy."""
    keys = {f"{_COLOCATED}.enabled": True}
    return _with(keys, propose(with_values(config, keys), gpu))


def separate(config: MasterConfig, gpu: Gpu) -> Proposal | None:
    """Propose the fastest division of the cluster between policy and engines.

    Raises:
        ConfigError: the cluster has one GPU.
    """
    cluster = config.cluster
    if cluster.num_nodes * cluster.gpus_per_node < 2:
        raise ConfigError("--engines separate divides GPUs, and the cluster has one. Raise cluster.gpus_per_node.")
    tried = [_with(keys, propose(with_values(config, keys), gpu)) for keys in _divisions(config)]
    return min((each for each in tried if each is not None), key=lambda each: each.seconds, default=None)


def smallest_cluster(config: MasterConfig, gpu: Gpu) -> tuple[int, int] | None:
    """Return the smallest larger cluster, among common sizes, for which there is a proposal.

    Returns:
        Machines, and GPUs of each; None if there is none up to 64 machines.
    """
    nodes, per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    more = [(1, gpus) for gpus in (2, 4, 8) if nodes == 1 and gpus > per_node]
    whole = max(per_node, _GPUS_OF_A_MACHINE) if nodes == 1 else per_node
    more += [(machines, whole) for machines in _MACHINES if machines > nodes]
    for machines, gpus in more:
        larger = with_values(config, {"cluster.num_nodes": machines, "cluster.gpus_per_node": gpus})
        jobs = (Job(larger, name, gpu) for name in larger.models)
        if all(Search.of(job).has_room() for job in jobs) and propose(larger, gpu) is not None:
            return machines, gpus
    return None


def _divisions(config: MasterConfig) -> Iterator[dict[str, Any]]:
    nodes, per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    off: dict[str, Any] = {f"{_COLOCATED}.enabled": False}
    total, key = (per_node, "gpus_per_node") if nodes == 1 else (nodes, "num_nodes")
    for engines in sorted({total // 4, total // 2, 3 * total // 4} - {0, total}):
        sizes = {f"{_COLOCATED}.resources.{key}": engines}
        yield off | sizes | ({f"{_COLOCATED}.resources.gpus_per_node": per_node} if nodes > 1 else {})


def _with(keys: dict[str, Any], found: Proposal | None) -> Proposal | None:
    """Add the keys for the place of the engines to a proposal."""
    if found is None:
        return None
    return Proposal(**{**vars(found), "values": {**keys, **found.values}})
