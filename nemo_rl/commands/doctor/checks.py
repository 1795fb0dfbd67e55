"""Define a check and its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_rl.config import ClusterConfig, RunConfig


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    """Result of the check."""
    found: str
    """Text of the finding."""
    advice: str = ""
    """Advice how to fix the problem, or empty if nothing needs to be done."""
    details: str = ""
    """Further lines for people, shown below the table."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name with unit, for later checks and `--json`."""
    check: str = ""
    """Name of the check, set by the runner."""
    node: str = ""
    """Address of the machine, or empty for this one."""


def ok(found: str, **more: str | Mapping[str, float]) -> Finding:
    """Return a finding of a passed check."""
    return Finding(Status.OK, found, **more)  # type: ignore[arg-type]


def skipped(found: str) -> Finding:
    """Return a finding of a check that does not apply or cannot be made here."""
    return Finding(Status.SKIPPED, found)


@dataclass(frozen=True)
class Check[Given]:
    """One check."""

    name: str
    """Name in the report."""
    look: Callable[[Given], Finding]
    """Function that inspects its argument and returns a finding. It may raise any error."""
    deadline_s: float = 30.0
    """Seconds after which the check has failed."""
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed before this one runs."""


@dataclass(frozen=True)
class NodeRequest:
    """A run's requirements of one machine, as plain values that can be sent to the nodes of a cluster."""

    uses_gpu: bool | None = None
    """Whether each rank has a GPU, or None without a configuration."""
    gpus: int | None = None
    """Number of GPUs on this machine according to Ray, or None if Ray is not running yet."""
    ranks: int | None = None
    """Number of processes that exchange tensors here, or None for one per GPU (two without GPUs)."""
    ports: tuple[int | None, int | None] = (
        ClusterConfig.model_fields["master_port_range_low"].default,
        ClusterConfig.model_fields["master_port_range_high"].default,
    )
    """Lowest and highest port for the stores of groups, or None to let the operating system choose."""
    port_count: int = 1
    """Number of these ports that the run needs."""
    address: str = "127.0.0.1"
    """Address of this machine for other machines."""
    starts_ray: bool = True
    """Whether a run starts its own Ray here."""
    engine: str | None = None
    """`policy.generation.backend`, or None without sampling or without a configuration."""
    needs_megatron: bool = False
    """Whether a model trains with Megatron Core."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages of the machine that starts the run, by name. Empty on that machine."""


def node_request(config: RunConfig | None, *, starts_ray: bool) -> NodeRequest:
    """Return the requirements of each machine for a configuration, or for any run if there is no configuration."""
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
