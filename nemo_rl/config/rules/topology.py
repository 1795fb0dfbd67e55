"""How many ranks train, score as teacher and generate, from `cluster`, `teacher.colocated` and `policy.generation`.

Invariant: the numbers follow from configuration alone; whether the machines exist is found out by
`nemo_rl.distributed`.
"""

import math
from dataclasses import dataclass

from nemo_rl.config.rules.engines import ranks_of_engine
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.distillation import TeacherPlacementConfig
from nemo_rl.config.schema.policy import PolicyConfig
from nemo_rl.utils.errors import ConfigError

_SIZE_KEYS = {
    "pp": "pipeline_parallel_size",
    "dp_replicate": "dp_replicate_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
"""Keys of the sizes that a backend's section asks for; a section without one has size 1."""


@dataclass(frozen=True)
class Topology:
    """Where policy and generation run.

    Attributes:
        policy_nodes: machines with policy ranks.
        policy_ranks_per_node: policy processes on each of them.
        generation_nodes: machines with engines.
        generation_ranks_per_node: engine processes on each of them; an engine has one or several.
    """

    policy_nodes: int
    policy_ranks_per_node: int
    generation_nodes: int
    generation_ranks_per_node: int

    @property
    def policy_ranks(self) -> int:
        """Policy processes in the run."""
        return self.policy_nodes * self.policy_ranks_per_node

    @property
    def generation_ranks(self) -> int:
        """Engine processes in the run."""
        return self.generation_nodes * self.generation_ranks_per_node


def plan_topology(cluster: ClusterConfig, policy: PolicyConfig) -> Topology:
    """Divide the machines between policy and generation.

    Colocated, both use all of them. Separate on GPUs, one machine is split by
    `colocated.resources.gpus_per_node`; several machines are divided by `colocated.resources.num_nodes`.
    Separate on CPUs, engines are additional processes on the same machines.
    """
    nodes, ranks = cluster.num_nodes, cluster.policy_ranks_per_node
    if policy.generation is None or policy.generation.colocated.enabled:
        return Topology(nodes, ranks, nodes, ranks)
    resources = policy.generation.colocated.resources
    if not cluster.uses_gpu:
        return Topology(nodes, ranks, nodes, resources.ranks_per_node or ranks_of_engine(policy.generation.engine))
    engine_gpus = resources.gpus_per_node or 0
    engine_nodes = resources.num_nodes or 0
    if nodes == 1:
        return Topology(1, cluster.gpus_per_node - engine_gpus, 1, engine_gpus)
    return Topology(nodes - engine_nodes, ranks, engine_nodes, engine_gpus or cluster.gpus_per_node)


def students_share(cluster: ClusterConfig, placement: TeacherPlacementConfig) -> ClusterConfig:
    """The cluster that a teacher of its own leaves to policy and generation; all of it when they share.

    Separate on GPUs, one machine is split by `resources.gpus_per_node`; several machines are divided by
    `resources.num_nodes`. Separate on CPUs, teacher ranks are additional processes on the same machines.
    """
    resources = placement.resources
    if placement.enabled or not cluster.uses_gpu:
        return cluster
    if cluster.num_nodes == 1:
        return cluster.model_copy(update={"gpus_per_node": cluster.gpus_per_node - (resources.gpus_per_node or 0)})
    return cluster.model_copy(update={"num_nodes": cluster.num_nodes - (resources.num_nodes or 0)})


def teachers_share(cluster: ClusterConfig, placement: TeacherPlacementConfig) -> ClusterConfig:
    """The machines and ranks of a teacher that does not share the policy's devices."""
    resources = placement.resources
    if not cluster.uses_gpu:
        return cluster.model_copy(update={"ranks_per_node": resources.ranks_per_node or 1})
    nodes = 1 if cluster.num_nodes == 1 else resources.num_nodes or 0
    gpus = resources.gpus_per_node or (0 if cluster.num_nodes == 1 else cluster.gpus_per_node)
    return cluster.model_copy(update={"num_nodes": nodes, "gpus_per_node": gpus, "ranks_per_node": None})


def parallel_sizes(policy: PolicyConfig, ranks: int) -> dict[str, int]:
    """Sizes of the parallel axes and of the expert view; `dp_shard` takes what the others leave.

    Raises:
        ConfigError: the ranks do not divide into the axes that are given, or a stage's ranks into those of experts.
    """
    section = policy.backend_section
    asked = {axis: getattr(section, key, 1) for axis, key in _SIZE_KEYS.items()}
    copies = math.prod(asked.values())
    if ranks % copies:
        product = " x ".join(f"{_SIZE_KEYS[axis]}={size}" for axis, size in asked.items() if size > 1)
        raise ConfigError(
            f"{ranks} ranks are no multiple of {copies} ({product}). Nearest numbers of ranks: "
            f"{', '.join(str(n) for n in (ranks // copies * copies, -(-ranks // copies) * copies) if n)}."
        )
    sizes = asked | {"dp_shard": ranks // copies, "ep": section.expert_parallel_size}
    sharing = sizes["dp_shard"] * asked["cp"] * asked["tp"]
    if sharing % sizes["ep"]:
        raise ConfigError(
            f"expert_parallel_size={sizes['ep']} does not divide the {sharing} ranks that hold one copy of a stage "
            f"(dp_shard {sizes['dp_shard']} x cp {asked['cp']} x tp {asked['tp']}). Use a divisor of {sharing}."
        )
    return sizes


def data_parallel_ranks(cluster: ClusterConfig, policy: PolicyConfig) -> int:
    """Groups of ranks that work on different samples."""
    sizes = parallel_sizes(policy, plan_topology(cluster, policy).policy_ranks)
    return sizes["dp_replicate"] * sizes["dp_shard"]
