"""Define the keys of `cluster`: devices, processes, deadlines.

Invariant: the device is chosen once, here. Every other package reads `uses_gpu` or `host.device`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Count, CountOrZero, Gibibytes, Port, Seconds, Workers, WorkersOrNone
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.optimizations.switch import OPTIMIZATIONS


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _known_optimizations(choice: str | list[str]) -> str | list[str]:
    unknown = [] if isinstance(choice, str) else [name for name in choice if name not in OPTIMIZATIONS]
    if unknown:
        allowed = ", ".join(OPTIMIZATIONS)
        raise PydanticCustomError("optimizations", f"unknown {', '.join(unknown)}; name some of: {allowed}")
    return choice


Device = Literal["cuda", "cpu"]
"""Device on which models compute."""

EnvVars = dict[str, Annotated[str, BeforeValidator(_as_text)]]
"""Environment variables of processes. Numbers are written as text."""


class TimeoutsConfig(Section):
    """Deadlines of the phases. A run that misses a deadline stops and names what it waited for."""

    setup_s: Seconds = 900.0
    """Time limit in seconds for starting all workers and engines."""
    rollout_s: Seconds = 3600.0
    """Time limit in seconds for the rollouts of one step."""
    engine_silence_s: Seconds = 300.0
    """Seconds for which a generation engine with open requests may be silent, or four times as long while its process
    computes. After that, the engine is stopped and replaced like a crashed one."""
    rollout_runner_silence_s: Seconds = 120.0
    """Seconds for which a rollout runner may be silent. After that, it is stopped and replaced like a crashed one, and
    its open groups are sampled again."""
    train_s: Seconds = 3600.0
    """Time limit in seconds for one call for training or log-probabilities."""
    weight_sync_s: Seconds = 600.0
    """Time limit in seconds for sending weights to the engines."""
    environment_s: Seconds = 600.0
    """Time limit in seconds for an environment to answer one sample. A batch that takes longer is repeated sample by
    sample. A single sample that takes longer gets an error."""
    checkpoint_s: Seconds = 1800.0
    """Time limit in seconds for writing or reading a checkpoint."""
    venv_s: Seconds = 1800.0
    """Time limit in seconds for making one Python environment (`cluster.venvs`) on all nodes."""
    shutdown_s: Seconds = 30.0
    """Time limit in seconds for workers to end by themselves."""


class VenvConfig(Section):
    """The Python environment of one kind of worker. It is made once on each node on which its processes may run."""

    extras: list[str] | None = None
    """Make an environment with the dependencies of nemo_rl and of these extras only; null: the packages of the
    driver."""
    packages: list[str] = Field(default_factory=list)
    """Additional requirements in pip's syntax; a wheel or a folder is given by its path. Installed packages keep their
    version unless they are named here."""
    py_executable: str | None = None
    """Path of an interpreter on every node, which is used instead of a new environment."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        made = self.extras is not None or bool(self.packages)
        if made == (self.py_executable is not None):
            raise PydanticCustomError("venv", "name extras and packages of an environment, or a py_executable")
        return self


class DataPlaneConfig(Section):
    """NeMo RL's section for moving rows without the driver. Rollout runners and Ray's object store do this here."""

    ignored: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("ack_timeout_ms", "backend", "claim_meta_poll_interval_s", "controller_address", "global_segment_size"),
            *("impl", "local_buffer_size", "num_storage_units", "observability", "storage_capacity"),
        ),
        "rows are in Ray's object store",
    )

    enabled: bool = False
    """Sample rollouts in runners, one per machine, so that tokens do not pass through the driver. This fills in
    cluster.rollout_runners if it is 0 and the run can have runners."""


class ClusterConfig(Section):
    """Machines and processes."""

    device: Device = "cuda"
    """Device of policy and engines: GPUs or the CPU."""
    num_nodes: Count = 1
    """Number of machines of the run."""
    segment_size: Count | None = None
    """Number of machines, consecutive in rank order, that must be in one NVLink domain. Ray resources
    `nvlink_domain_<id>`, which ray.sub sets, define the domains. null, or no such resources: machines in the order of
    their addresses."""
    gpus_per_node: Annotated[WorkersOrNone, OnlyWith("device", ("cuda",))] = 1
    """Number of GPUs used on each machine."""
    gpu_memory_gb: Annotated[Gibibytes | None, OnlyWith("device", ("cuda",))] = None
    """Gibibytes of each GPU, for predictions of memory on other machines; null: the memory of the GPUs of this machine,
    or 80 in a dry run without GPUs."""
    ranks_per_node: Workers | None = None
    """Number of policy processes on each machine; null: gpus_per_node on GPUs, 1 on the CPU."""
    threads_per_rank: Workers | None = None
    """Number of CPU threads of a policy process; null: cores divided by ranks_per_node, at least 1. With
    overlap.mode=ahead, the cores are also divided among engines on the same machine."""
    max_actor_restarts: CountOrZero = 10
    """Number of restarts after which a run stops: of all generation engines together, or of one environment without an
    answer in between."""
    max_run_restarts: CountOrZero | None = None
    """Number of times that a run replaces the ranks of its models after a rank died or hung, and trains again from the
    newest checkpoint, or from step 1 without one. Engines and environments are kept. null: 3 with
    checkpointing.enabled, else 0. The training service starts its ranks and engines again so many times within an hour;
    null: 3."""
    rollout_runners: WorkersOrNone = 0
    """Number of actors, on different nodes, that sample rollouts; 0: the driver samples them. With runners, tokens and
    texts stay in Ray's object store, and the driver gets only lengths, rewards and versions. Each runner has its own
    engines and environment processes. Only for GRPO; see docs/development/rollout-runners.md."""
    agent_endpoint: AgentEndpointConfig = Field(default_factory=AgentEndpointConfig)
    """The HTTP endpoint from which agent programs sample."""
    venvs: dict[str, VenvConfig] = Field(default_factory=dict)
    """Separate Python environments, for `policy` (teachers included), for `generation`, or for an environment by its
    name in env; all other workers use the driver's interpreter."""
    optimizations: Annotated[Literal["auto", "none"] | list[str], AfterValidator(_known_optimizations)] = "auto"
    """Optimizations of the start and of CPU steps that do not change results: `auto` uses all whose libraries have the
    tested versions, `none` uses none, and a list of names uses only those (docs/development/optimizations.md)."""
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    """Deadlines of the phases."""
    master_port_range_low: Port | None = 1400
    """Lowest port for the rendezvous of worker processes."""
    master_port_range_high: Port | None = 1999
    """Highest port for the rendezvous of worker processes."""

    @property
    def uses_gpu(self) -> bool:
        """Return True if policy and engines run on GPUs."""
        return self.device == "cuda"

    @property
    def policy_ranks_per_node(self) -> int:
        """Policy processes on one machine: `ranks_per_node`, or if that is null, `gpus_per_node` on GPUs, 1 on CPUs."""
        if self.ranks_per_node is not None:
            return self.ranks_per_node
        return self.gpus_per_node if self.uses_gpu else 1
