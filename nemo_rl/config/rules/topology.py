"""How many ranks train, score as teacher and generate, from `cluster`, `teacher.colocated` and `policy.generation`.

Invariant: the numbers follow from configuration alone; whether the machines exist is found out by
`nemo_rl.distributed`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl.config.rules.engines import ranks_of_engine
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.distillation import TeacherConfig, TeacherPlacementConfig
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


def model_ranks(cluster: ClusterConfig, models: Sequence[PolicyConfig]) -> list[int]:
    """Ranks of each model of a run, the policy first; a teacher has the policy's unless it is placed elsewhere."""
    policy, *others = models
    apart = [model.colocated for model in others if isinstance(model, TeacherConfig) and not model.colocated.enabled]
    for placement in apart:
        share = teachers_share(cluster, placement)
        cluster = students_share(cluster, placement)
    ranks = plan_topology(cluster, policy).policy_ranks
    return [ranks, *(share.num_nodes * share.policy_ranks_per_node if apart else ranks for _ in others)]


def parallel_sizes(policy: PolicyConfig, ranks: int) -> dict[str, int]:
    """Sizes of the parallel axes and of the expert view; `dp_shard` takes what the others leave.

    Raises:
        ConfigError: the ranks do not divide into the axes that are given, or a stage's ranks into those of experts.
    """
    section = policy.backend_section
    asked = {axis: getattr(section, key, 1) for axis, key in _SIZE_KEYS.items()}
    copies = math.prod(asked.values())
    if ranks % copies:
        near = [n for n in (ranks // copies * copies, -(-ranks // copies) * copies) if n]
        raise ConfigError(
            f"{ranks} ranks are no multiple of {copies} ({_product(asked)}). Nearest numbers of ranks: "
            f"{', '.join(map(str, near))}.{_nearest_sizes(asked, ranks)}"
        )
    sizes = asked | {"dp_shard": ranks // copies, "ep": section.expert_parallel_size}
    sharing = sizes["dp_shard"] * asked["cp"] * asked["tp"]
    if sharing % sizes["ep"]:
        near = sorted([n for n in range(1, sharing + 1) if sharing % n == 0], key=lambda n: abs(n - sizes["ep"]))[:2]
        raise ConfigError(
            f"expert_parallel_size={sizes['ep']} does not divide the {sharing} ranks that share a copy of a stage: "
            f"{sharing} / {sizes['ep']} = {sharing / sizes['ep']:g} ({ranks} ranks"
            f"{_outside(asked)}). Nearest values: {', '.join(map(str, sorted(near)))}."
        )
    return sizes


def row_length_multiple(policy: PolicyConfig) -> int:
    """Tokens that the length of a row is a multiple of, so that the ranks that share a row get equal parts."""
    return math.lcm(policy.make_sequence_length_divisible_by, row_parts(policy))


def row_parts(policy: PolicyConfig) -> int:
    """Equal parts that a row is cut into.

    A context-parallel rank has two equal chunks of a row; sequence-parallel ranks divide what it has.
    """
    section = policy.backend_section
    cp, sharing = (getattr(section, key, 1) for key in ("context_parallel_size", "tensor_parallel_size"))
    sharing = sharing if getattr(section, "sequence_parallel", False) else 1
    return cp * (math.lcm(2, sharing) if cp > 1 else sharing)


def _product(sizes: Mapping[str, int]) -> str:
    """The sizes above 1 as the user writes them."""
    return " x ".join(f"{_SIZE_KEYS[axis]}={size}" for axis, size in sizes.items() if size > 1)


def _outside(asked: Mapping[str, int]) -> str:
    """What divides the ranks before experts do."""
    product = _product({axis: size for axis, size in asked.items() if axis in ("pp", "dp_replicate")})
    return f" / {product}".replace(" x ", " / ") if product else ""


def _nearest_sizes(asked: Mapping[str, int], ranks: int) -> str:
    """The largest smaller sizes, one key changed each, that divide the ranks."""
    fitting = []
    for axis, size in asked.items():
        others = math.prod(asked.values()) // size
        smaller = [n for n in range(1, size) if ranks % (others * n) == 0]
        fitting += [f"{_SIZE_KEYS[axis]}={smaller[-1]}"] if smaller else []
    return f" Or, for {ranks}: {' or '.join(fitting)}." if fitting else ""


def data_parallel_ranks(cluster: ClusterConfig, policy: PolicyConfig) -> int:
    """Groups of ranks that work on different samples."""
    sizes = parallel_sizes(policy, plan_topology(cluster, policy).policy_ranks)
    return sizes["dp_replicate"] * sizes["dp_shard"]
