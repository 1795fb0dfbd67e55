"""Predict the memory of a run before anything starts, and compare it with the memory of the devices.

Invariant: a prediction may be wrong, so it only warns. A run is refused only if weights and optimizer state alone are
larger than the memory, because their size is certain.
"""

import logging
from collections.abc import Mapping

from nemo_rl.config import ClusterConfig, PolicyConfig, Role, model_ranks
from nemo_rl.host.capacity import machine_bytes
from nemo_rl.host.machine_load import query_gpus
from nemo_rl.models.capacity.memory import MemoryPlan
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_WAYS_OUT = (
    "Less is needed with more ranks, smaller microbatches or, in {section}.{backend}, {tensor} and "
    "activation_checkpointing."
)


def log_memory(
    cluster: ClusterConfig, roles: Mapping[str, Role], available: float | None, rows_per_sample: int = 1
) -> str:
    """Log the predicted memory of each model's ranks; warn if it is more than the ranks have.

    Args:
        cluster: the machines.
        roles: models of the run by name, the policy among them.
        available: bytes of a rank, see `memory_of_a_rank`; None if unknown.
        rows_per_sample: rows of a sample, 2 for pairs.

    Returns:
        The predictions in one line.

    Raises:
        ConfigError: weights and optimizer state of one model do not fit.
    """
    told = []
    for name, num_ranks in sorted(model_ranks(cluster, roles).items(), key=lambda item: item[0] != "policy"):
        section, trains, keeps_reference = roles[name].section, roles[name].trains, roles[name].keeps_reference
        plan = training_backend(section).predict_memory(
            section,
            num_ranks,
            trains=trains,
            keeps_reference=keeps_reference,
            on_gpu=cluster.uses_gpu,
            rows_per_sample=rows_per_sample,
        )
        if plan is None:
            told.append(f"{name}: its backend does not predict memory")
            continue
        logger.info("%s", plan.table(f"Predicted memory of {name} ({num_ranks} ranks)"))
        told.append(f"{name}: {plan.peak / 2**30:.3g} GiB at most on each of {num_ranks} ranks")
        _compare_memory(name, section, plan, available)
    return "; ".join(told)


def _compare_memory(name: str, section: PolicyConfig, plan: MemoryPlan, available: float | None) -> None:
    """Warn if the prediction for a rank is more than its memory.

    Args:
        name: name of the model.
        section: its section.
        plan: the prediction.
        available: bytes of a rank; None if unknown.
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
    """Return a sentence about the keys with which a model's ranks need less memory."""
    tensor = section.backend_section.size_keys.get("tp", "tensor parallelism")
    return _WAYS_OUT.format(section=name, backend=section.backend_key, tensor=tensor)


def memory_of_a_rank(
    cluster: ClusterConfig, gpu_size: float | None = None, host_size: float | None = None
) -> float | None:
    """Return the bytes of one GPU, or a rank's share of a machine; None if the machines are on a cluster.

    Args:
        cluster: the machines; `gpu_memory_gb` comes first.
        gpu_size: bytes of the smallest GPU, as measured; None: that of this machine.
        host_size: bytes of the smallest machine, as measured; None: that of this machine.
    """
    if cluster.uses_gpu and cluster.gpu_memory_gb is not None:
        return cluster.gpu_memory_gb * 2**30
    measured = gpu_size if cluster.uses_gpu else host_size
    if measured is None and cluster_address():
        return None
    if cluster.uses_gpu:
        return measured or gpu_bytes()
    return (measured or machine_bytes()) / cluster.policy_ranks_per_node


def gpu_bytes() -> float | None:
    """Return the bytes of the smallest GPU that this process may use; None if the driver does not report them."""
    try:
        return min(float(total) for (total,) in query_gpus("memory.total")) * 2**20
    except ValueError:
        return None
