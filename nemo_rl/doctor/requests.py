"""Define the input of the checks of one machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl.config import ClusterConfig, RunConfig


@dataclass(frozen=True)
class NodeRequest:
    """A run's requirements of one machine; plain values, which can be sent to the nodes of a cluster.

    Attributes:
        uses_gpu: whether each rank has a GPU; None without a configuration.
        gpus: number of GPUs on this machine according to Ray; None if Ray is not running yet.
        ranks: processes that exchange tensors here; None: one per GPU, or two.
        ports: lowest and highest port for the stores of groups; None lets the operating system choose.
        port_count: number of such ports that the run needs.
        address: address of this machine for other machines.
        starts_ray: whether a run starts its own Ray here.
        engine: `policy.generation.backend`; None without sampling, or without a configuration.
        needs_megatron: whether a model trains with Megatron Core.
        versions: packages of the machine that starts the run, by name; empty on that machine.
    """

    uses_gpu: bool | None = None
    gpus: int | None = None
    ranks: int | None = None
    ports: tuple[int | None, int | None] = (
        ClusterConfig.model_fields["master_port_range_low"].default,
        ClusterConfig.model_fields["master_port_range_high"].default,
    )
    port_count: int = 1
    address: str = "127.0.0.1"
    starts_ray: bool = True
    engine: str | None = None
    needs_megatron: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


def node_request(config: RunConfig | None, *, starts_ray: bool) -> NodeRequest:
    """Return a configuration's requirements of each machine; without one, those of any run."""
    if config is None:
        return NodeRequest(starts_ray=starts_ray)
    cluster = config.cluster
    models = [section for _, _, section in config.model_keys()]
    generation = config.policy.generation
    return NodeRequest(
        uses_gpu=cluster.uses_gpu,
        ranks=cluster.policy_ranks_per_node if config.models else 1,
        ports=(cluster.master_port_range_low, cluster.master_port_range_high),
        port_count=len(models) + (generation is not None),
        starts_ray=starts_ray,
        engine=None if generation is None else generation.backend,
        needs_megatron=any(model.megatron_cfg.enabled for model in models),
    )
