"""Choose the Ray bundles of a model that rewards answers: either shared CPUs or its own GPUs."""

from nemo_rl.config.schema.model.policy import OwnDevicesConfig
from nemo_rl.distributed.cluster.node_choice import living_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.utils.errors import ConfigError


def places_of(name: str, resources: OwnDevicesConfig, *, on_gpus: bool) -> RayVirtualCluster:
    """Return the bundles of a model without reserving resources for them.

    Args:
        name: name that Ray's tools show.
        on_gpus: whether each process has a GPU.
    """
    per_node = (resources.gpus_per_node or 1) if on_gpus else (resources.ranks_per_node or 1)
    return RayVirtualCluster(
        [per_node] * (resources.num_nodes or 1),
        use_gpus=on_gpus,
        num_gpus_per_node=per_node,
        name=name,
        placement_group_strategy="STRICT_SPREAD",
    )


def check_processors(place: str, resources: OwnDevicesConfig) -> None:
    """Refuse more processes on a machine than it has processors, because each process computes all the time.

    Args:
        resources: devices of the model, on CPUs.

    Raises:
        ConfigError: no machine of the cluster has as many processors, or there are too few machines.
    """
    asked, machines = resources.ranks_per_node or 1, resources.num_nodes or 1
    processors = sorted((int(node.total.get("CPU", 0)) for node in living_nodes()), reverse=True)
    if len(processors) < machines:
        raise ConfigError(f"{place}.resources.num_nodes={machines}, but the cluster has {len(processors)} machines.")
    if asked > (most := processors[machines - 1]):
        raise ConfigError(
            f"{place}.resources.ranks_per_node={asked} starts {asked} processes on a machine, which has {most} "
            f"processors. Set it to at most {max(most, 1)}."
        )
