"""Divide a cluster between the policy and engines with their own GPUs, and find how many GPUs a run needs.

Invariant: a cluster is divided as `plan_topology` expects: one machine by GPUs, several by machines.
"""

from collections.abc import Iterator
from typing import Any

from nemo_rl.commands.size.jobs import Job, with_values
from nemo_rl.commands.size.machines import Gpu
from nemo_rl.commands.size.proposal import Proposal, propose
from nemo_rl.commands.size.search import Search
from nemo_rl.config import MasterConfig, RolloutMasterConfig
from nemo_rl.utils.errors import ConfigError

_COLOCATED = "policy.generation.colocated"
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_GPUS_OF_A_MACHINE = 8


def placements(engines: str, config: MasterConfig) -> list[dict[str, Any]]:
    """Return the values of the keys for each way to place the engines that is tried.

    Args:
        engines: what `--engines` asks for.
        config: the run.

    Raises:
        ConfigError: the run has no engines to place, or the cluster has one GPU to divide.
    """
    if engines == "as-given":
        return [{}]
    if not isinstance(config, RolloutMasterConfig):
        raise ConfigError(f"--engines {engines} places engines, and this run samples nothing. Leave it out.")
    if engines == "colocated":
        return [{f"{_COLOCATED}.enabled": True}]
    if config.cluster.num_nodes * config.cluster.gpus_per_node < 2:
        raise ConfigError("--engines separate divides GPUs, and the cluster has one. Raise cluster.gpus_per_node.")
    return list(_divisions(config))


def placed(engines: str, config: MasterConfig, gpu: Gpu, refused: list[str] | None = None) -> Proposal | None:
    """Propose the fastest sizes for engines that are placed as asked for.

    Args:
        engines: what `--engines` asks for.
        config: the run.
        gpu: the GPUs.
        refused: see `propose`.

    Raises:
        ConfigError: see `placements` and `propose`.
    """
    ways = placements(engines, config)
    tried = [_with(keys, propose(with_values(config, keys), gpu, refused)) for keys in ways]
    return min((each for each in tried if each is not None), key=lambda each: each.seconds, default=None)


def smallest_cluster(engines: str, config: MasterConfig, gpu: Gpu) -> tuple[int, int] | None:
    """Return machines and GPUs of each of the smallest larger cluster, among common ones, with sizes that fit."""
    nodes, per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    more = [(1, gpus) for gpus in (2, 4, 8) if nodes == 1 and gpus > per_node]
    whole = max(per_node, _GPUS_OF_A_MACHINE) if nodes == 1 else per_node
    more += [(machines, whole) for machines in _MACHINES if machines > nodes]
    for machines, gpus in more:
        larger = with_values(config, {"cluster.num_nodes": machines, "cluster.gpus_per_node": gpus})
        ways = (with_values(larger, keys) for keys in placements(engines, larger))
        if any(_have_room(way, gpu) for way in ways) and placed(engines, larger, gpu) is not None:
            return machines, gpus
    return None


def _have_room(config: MasterConfig, gpu: Gpu) -> bool:
    return all(Search.of(Job(config, name, gpu)).has_room() for name in config.models)


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
