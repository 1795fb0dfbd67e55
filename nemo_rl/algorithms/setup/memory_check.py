"""What a run will need of memory, said before anything starts, and held against what the devices have.

Invariant: a prediction may be wrong, so it only warns; what is refused is certain: weights and optimizer state alone
that are larger than the memory.
"""

import logging
from collections.abc import Iterator, Mapping

from nemo_rl.algorithms.setup.roles import Role
from nemo_rl.config import ClusterConfig, PolicyConfig, model_ranks
from nemo_rl.host.memory import machine_bytes
from nemo_rl.host.nvidia_smi import query_gpus
from nemo_rl.models.capacity.memory import MemoryPlan
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.cluster_address import cluster_address
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_WAYS_OUT = (
    "Less is needed with more ranks, smaller microbatches or, in {section}.{backend}, {tensor} and "
    "activation_checkpointing."
)


type _Predicted = tuple[str, PolicyConfig, int, MemoryPlan | None]


def tell_memory(cluster: ClusterConfig, roles: Mapping[str, Role]) -> None:
    """Log the memory of each model's ranks; warn where it is more than there is.

    Args:
        cluster: the machines.
        roles: models of the run by name, the policy among them.

    Raises:
        ConfigError: weights and optimizer state of one model do not fit.
    """
    available = memory_of_a_rank(cluster)
    for name, section, num_ranks, plan in memory_plans(cluster, roles):
        if plan is not None:
            logger.info("%s", plan.table(f"Predicted memory of {name} ({num_ranks} ranks)"))
            compare_memory(name, section, plan, available)


def memory_plans(cluster: ClusterConfig, roles: Mapping[str, Role]) -> Iterator[_Predicted]:
    """Name, section, ranks and prediction of each model, the policy first; arguments as `tell_memory`."""
    names = sorted(roles, key=lambda name: name != "policy")
    ranks = model_ranks(cluster, [roles[name].section for name in names])
    for name, num_ranks in zip(names, ranks, strict=True):
        role = roles[name]
        yield (
            name,
            role.section,
            num_ranks,
            training_backend(role.section).predict_memory(
                role.section,
                num_ranks,
                trains=role.trains,
                keeps_reference=role.keeps_reference,
                on_gpu=cluster.uses_gpu,
            ),
        )


def compare_memory(name: str, section: PolicyConfig, plan: MemoryPlan, available: float | None) -> None:
    """Warn where a rank's prediction is more than the bytes it has; None means that these are unknown.

    Raises:
        ConfigError: weights and optimizer state alone are more.
    """
    if available is None or plan.peak <= available:
        return
    ways_out = ways_to_less(name, section)
    has = f"of the {available / 2**30:.3g} GiB that it has"
    if plan.certain > available:
        raise ConfigError(
            f"weights and optimizer state of {name} take {plan.certain / 2**30:.3g} GiB on each rank, {has}. {ways_out}"
        )
    logger.warning("%s will need about %.3g GiB on each rank, %s. %s", name, plan.peak / 2**30, has, ways_out)


def ways_to_less(name: str, section: PolicyConfig) -> str:
    """What makes a model's ranks need less memory, by its keys."""
    tensor = section.backend_section.size_keys.get("tp", "tensor parallelism")
    return _WAYS_OUT.format(section=name, backend=section.backend_key, tensor=tensor)


def memory_of_a_rank(cluster: ClusterConfig) -> float | None:
    """Bytes of one GPU, or a rank's share of this machine; None where the machines are elsewhere."""
    if cluster.uses_gpu and cluster.gpu_memory_gb is not None:
        return cluster.gpu_memory_gb * 2**30
    if cluster_address():
        return None
    return gpu_bytes() if cluster.uses_gpu else machine_bytes() / cluster.policy_ranks_per_node


def gpu_bytes() -> float | None:
    """Memory of the smallest GPU that this process may use; None where its driver does not say."""
    try:
        return min(float(total) for (total,) in query_gpus("memory.total")) * 2**20
    except ValueError:
        return None
