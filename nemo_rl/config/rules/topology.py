"""Compute the models of a run and their ranks from `cluster`, the models and `policy.generation`.

A role defines the purpose of a model and its devices.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.engines import ranks_of_engine
from nemo_rl.config.rules.megatron import fp8_row_multiple
from nemo_rl.config.schema.algorithms.overlap import OverlapConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.parallel import BackendSection
from nemo_rl.config.schema.model.policy import OwnDevicesConfig, PolicyConfig
from nemo_rl.utils.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    section: PolicyConfig
    """Section with the keys of the model. `section.placement` defines its devices."""
    trains: bool = True
    """Whether the model has an optimizer and is saved in checkpoints. Otherwise, it is frozen."""
    keeps_reference: bool = False
    """Whether to keep the initial weights for reference log-probabilities."""

    @property
    def shares_with(self) -> str | None:
        """Name of the model whose devices this model uses ("policy" for the policy), or None if it has its own."""
        return self.section.placement.shares_with


def trained(models: Mapping[str, Role]) -> dict[str, Role]:
    """Return the trained models, which are also the models of a checkpoint."""
    return {name: role for name, role in models.items() if role.trains}


def sharing(models: Mapping[str, Role]) -> dict[str, list[str]]:
    """Return the models on each group of devices, owner first, by the name of the devices' owner."""
    owners = [name for name, role in models.items() if role.shares_with in (None, name)]
    members = {name: role.shares_with for name, role in models.items() if name not in owners}
    return {owner: [owner, *(name for name, host in members.items() if host == owner)] for owner in owners}


_FACTORS = ("pp", "dp_replicate", "cp", "tp")
"""Axes whose size is in the section. Their product divides the number of ranks."""


@dataclass(frozen=True)
class Topology:
    """Machines and ranks of policy and generation."""

    policy_nodes: int
    """Number of machines with policy ranks."""
    policy_ranks_per_node: int
    """Number of policy processes on each of these machines."""
    generation_nodes: int
    """Number of machines with engines."""
    generation_ranks_per_node: int
    """Number of engine processes on each of these machines. An engine has one or several processes."""

    @property
    def policy_ranks(self) -> int:
        """Return the number of policy processes in the run."""
        return self.policy_nodes * self.policy_ranks_per_node

    @property
    def generation_ranks(self) -> int:
        """Return the number of engine processes in the run."""
        return self.generation_nodes * self.generation_ranks_per_node


def plan_topology(cluster: ClusterConfig, policy: PolicyConfig) -> Topology:
    """Divide the machines between policy and generation.

    If policy and engines are colocated, both use all machines. On GPUs, separate engines get GPUs of a single machine
    (`colocated.resources.gpus_per_node`) or some of several machines (`colocated.resources.num_nodes`). On CPUs,
    separate engines are additional processes on the same machines, unless `resources.num_nodes` gives them their own
    machines.
    """
    nodes, ranks = cluster.num_nodes, cluster.policy_ranks_per_node
    if policy.generation is None or policy.generation.colocated.enabled:
        return Topology(nodes, ranks, nodes, ranks)
    resources = policy.generation.colocated.resources
    engine_gpus = resources.gpus_per_node or 0
    engine_nodes = (resources.num_nodes or 0) if nodes > 1 else 0
    if not cluster.uses_gpu:
        engine_ranks = resources.ranks_per_node or ranks_of_engine(policy.generation.engine)
        return Topology(nodes - engine_nodes, ranks, engine_nodes or nodes, engine_ranks)
    if nodes == 1:
        return Topology(1, cluster.gpus_per_node - engine_gpus, 1, engine_gpus)
    return Topology(nodes - engine_nodes, ranks, engine_nodes, engine_gpus or cluster.gpus_per_node)


def busy_engines(overlap: OverlapConfig, cluster: ClusterConfig, policy: PolicyConfig) -> int:
    """Return the number of engine workers that use the cores of a policy machine while its ranks train.

    It is 0 on GPUs, for engines on other machines, and in modes with mostly idle engines.
    """
    topology = plan_topology(cluster, policy)
    has_own_machines = topology.generation_nodes < cluster.num_nodes
    if overlap.mode != "ahead" or cluster.uses_gpu or has_own_machines:
        return 0
    return topology.generation_ranks_per_node


def divide_cluster(cluster: ClusterConfig, models: Mapping[str, Role]) -> dict[str, ClusterConfig]:
    """Return each model's part of the cluster. Models that share devices have the same part.

    The policy's part is the rest without models on their own devices, and generation uses it too (`plan_topology`). On
    GPUs, `resources.gpus_per_node` divides a single machine, and `resources.num_nodes` divides several machines. On
    CPUs, the ranks of a model with its own devices are additional processes on the same machines.
    """
    own = {name: role.section.placement.resources for name, role in models.items() if role.shares_with is None}
    parts = {name: _own_part(cluster, devices) for name, devices in own.items()}
    parts["policy"] = cluster
    for devices in own.values():
        parts["policy"] = without_devices(parts["policy"], devices)
    return {name: parts[role.shares_with or name] for name, role in models.items()}


def _own_part(cluster: ClusterConfig, devices: OwnDevicesConfig) -> ClusterConfig:
    """Return the machines and ranks of a model with its own devices, as a cluster."""
    if not cluster.uses_gpu:
        return cluster.model_copy(update={"ranks_per_node": devices.ranks_per_node or 1})
    nodes = 1 if cluster.num_nodes == 1 else devices.num_nodes or 0
    gpus = devices.gpus_per_node or (0 if cluster.num_nodes == 1 else cluster.gpus_per_node)
    return cluster.model_copy(update={"num_nodes": nodes, "gpus_per_node": gpus, "ranks_per_node": None})


def without_devices(cluster: ClusterConfig, devices: OwnDevicesConfig) -> ClusterConfig:
    """Return the part of a cluster without the devices of a model that has its own."""
    if not cluster.uses_gpu:
        return cluster
    if cluster.num_nodes == 1:
        return cluster.model_copy(update={"gpus_per_node": cluster.gpus_per_node - (devices.gpus_per_node or 0)})
    return cluster.model_copy(update={"num_nodes": cluster.num_nodes - (devices.num_nodes or 0)})


def model_ranks(cluster: ClusterConfig, models: Mapping[str, Role]) -> dict[str, int]:
    """Return the number of ranks of each model of a run. Models that share devices have the same number."""
    parts = divide_cluster(cluster, models)
    ranks = {name: parts[name].num_nodes * parts[name].policy_ranks_per_node for name in models}
    ranks["policy"] = plan_topology(parts["policy"], models["policy"].section).policy_ranks
    return {name: ranks[role.shares_with or name] for name, role in models.items()}


def parallel_sizes(policy: PolicyConfig, ranks: int) -> dict[str, int]:
    """Return the sizes of the parallel axes, with the remaining ranks in `dp_shard`, and the sizes of the expert mesh.

    Raises:
        ConfigError: the ranks do not divide into the given axes, or the ranks of a stage into the axes of the experts.
    """
    section = policy.backend_section
    asked = {axis: section.size(axis) for axis in _FACTORS}
    copies = math.prod(asked.values())
    if ranks % copies:
        near = [n for n in (ranks // copies * copies, -(-ranks // copies) * copies) if n]
        raise ConfigError(
            f"{ranks} ranks are no multiple of {copies} ({_product(section, _FACTORS)}). Nearest numbers of ranks: "
            f"{', '.join(map(str, near))}.{_nearest_sizes(section, ranks)}"
        )
    sizes = asked | {"dp_shard": ranks // copies, "ep": section.size("ep")}
    sharing = sizes["dp_shard"] * asked["cp"] * asked["tp"]
    _check_expert_ranks(section, sharing, ranks)
    return sizes


def _check_expert_ranks(section: BackendSection, sharing: int, ranks: int) -> None:
    """Check that the ranks of one copy of a stage can be divided into the expert and expert-tensor axes."""
    parts, size = section.size("etp"), section.size("ep")
    if sharing % (parts * size) == 0:
        return
    fitting = [n for n in range(1, sharing + 1) if sharing % (parts * n) == 0]
    near = ", ".join(map(str, sorted(sorted(fitting, key=lambda n: abs(n - size))[:2])))
    way_out = f"Nearest values{f' of {section.size_keys["ep"]}' if parts > 1 else ''}: {near}."
    outside = _product(section, ("pp", "dp_replicate"))
    raise ConfigError(
        f"{_product(section, ('ep', 'etp'))} does not divide the {sharing} ranks that share a copy of a stage: "
        f"{sharing} / {parts * size} = {sharing / (parts * size):g} ({ranks} ranks"
        f"{f' / {outside}'.replace(' x ', ' / ') if outside else ''}). "
        f"{way_out if near else f'Lower {section.size_keys["etp"]}.'}"
    )


def row_length_multiple(policy: PolicyConfig) -> int:
    """Return the number that must divide a row's length in tokens, so that ranks get equal parts.

    With float8 training, each part must also be a multiple of the size that kernels accept.
    """
    return math.lcm(policy.make_sequence_length_divisible_by, row_parts(policy) * fp8_row_multiple(policy))


def row_parts(policy: PolicyConfig) -> int:
    """Return the number of equal parts into which ranks divide a row.

    A context-parallel rank has two equal chunks of a row, and sequence-parallel ranks divide each chunk again.
    """
    section = policy.backend_section
    cp, sharing = section.size("cp"), section.size("tp")
    sharing = sharing if getattr(section, "sequence_parallel", False) else 1
    return cp * (math.lcm(2, sharing) if cp > 1 else sharing)


def _product(section: BackendSection, axes: Iterable[str]) -> str:
    """Return the sizes above 1 as text, with the keys under which users write them."""
    return " x ".join(f"{section.size_keys[axis]}={section.size(axis)}" for axis in axes if section.size(axis) > 1)


def _nearest_sizes(section: BackendSection, ranks: int) -> str:
    """Return a text that suggests, for each axis, the largest smaller size that divides the ranks."""
    copies = math.prod(map(section.size, _FACTORS))
    fitting = []
    for axis in _FACTORS:
        size = section.size(axis)
        smaller = [n for n in range(1, size) if ranks % (copies // size * n) == 0]
        fitting += [f"{section.size_keys[axis]}={smaller[-1]}"] if smaller else []
    return f" Or, for {ranks}: {' or '.join(fitting)}." if fitting else ""


def data_parallel_ranks(cluster: ClusterConfig, policy: PolicyConfig) -> int:
    """Return the number of groups of ranks that process different samples."""
    sizes = parallel_sizes(policy, plan_topology(cluster, policy).policy_ranks)
    return sizes["dp_replicate"] * sizes["dp_shard"]


def check_venvs(cluster: ClusterConfig, kinds: Collection[str]) -> Findings:
    """Check that each name in `cluster.venvs` is one of the kinds of workers of the run."""
    for name in cluster.venvs:
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            yield f"cluster.venvs.{name}: this run has no such workers; it has: {known}.{did_you_mean(name, kinds)}"
