"""Start the models of a run.

A run names its models, for example `{"policy": ..., "critic": ...}`. `config.Role` describes each model, and each
becomes a `Policy`. Invariant: a worker that was started is registered for shutdown before it is used.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.runtime.device_sharing import device_user
from nemo_rl.config import (
    CheckpointingConfig,
    ClusterConfig,
    PolicyConfig,
    Role,
    divide_cluster,
    plan_topology,
    sharing,
)
from nemo_rl.distributed.cluster.node_checks import Shared, check_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.lm_policy import Policy


def place_models(cluster: ClusterConfig, models: Mapping[str, Role]) -> dict[str, RayVirtualCluster]:
    """Reserve resource bundles for every model and for "generation". Models that share devices get the same object."""
    parts, groups = divide_cluster(cluster, models), sharing(models)
    places: dict[str, RayVirtualCluster] = {}
    for owner in (name for name in groups if name != "policy"):
        part = parts[owner]
        places[owner] = _reserve(part, owner, part.num_nodes, part.policy_ranks_per_node, len(groups[owner]))
    apart = list(places.values()) if parts["policy"].num_nodes < cluster.num_nodes else []
    num_sharing = len(groups["policy"]) - 1
    places["policy"], generation = make_clusters(parts["policy"], models["policy"].section, num_sharing, apart)
    places |= {name: places[owner] for owner, names in groups.items() for name in names}
    return {**places, "generation": generation}


def make_clusters(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    num_sharing: int = 0,
    apart_from: Sequence[RayVirtualCluster] = (),
) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Return the bundles for policy and generation. They are one object if both share devices or nothing is sampled.

    Args:
        policy: Section that says where generation runs.
        num_sharing: Number of further worker groups that will share the policy's bundles.
        apart_from: Clusters whose machines must not be used.
    """
    topology = plan_topology(cluster, policy)
    nodes, per_node = topology.policy_nodes, topology.policy_ranks_per_node
    if policy.generation is None:
        alone = _reserve(cluster, "policy", nodes, per_node, 1 + num_sharing, apart_from)
        return alone, alone
    if policy.generation.colocated.enabled:
        shared = _reserve(cluster, "policy_and_generation", nodes, per_node, 2 + num_sharing, apart_from)
        return shared, shared
    trains = _reserve(cluster, "policy", nodes, per_node, 1 + num_sharing, apart_from)
    if topology.generation_nodes + nodes <= cluster.num_nodes:
        apart_from = [*apart_from, trains]
    engines, per_node = topology.generation_nodes, topology.generation_ranks_per_node
    return trains, _reserve(cluster, "generation", engines, per_node, 1, apart_from)


def _reserve(
    cluster: ClusterConfig,
    name: str,
    nodes: int,
    per_node: int,
    groups: int,
    apart_from: Sequence[RayVirtualCluster] = (),
) -> RayVirtualCluster:
    return RayVirtualCluster(
        [per_node] * nodes,
        use_gpus=cluster.uses_gpu,
        max_colocated_worker_groups=groups,
        num_gpus_per_node=max(cluster.gpus_per_node, 1),
        name=name,
        placement_group_strategy="STRICT_SPREAD",
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
        segment_size=cluster.segment_size,
        apart_from=apart_from,
    )


_RESTARTS_WITH_CHECKPOINTS = 3


@dataclass(frozen=True)
class RankStarter:
    """Start ranks of models, with the weights of `model_name` or of a checkpoint."""

    cluster: ClusterConfig
    """Configuration with time limits and numbers of threads."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer to save with the weights."""
    seed: int
    resume_path: Path | None = None
    """Step folder of a checkpoint. If None, models start from `section.model_name`."""
    busy_engines: int = 0
    """Number of engine workers per machine that compute at the same time as the ranks."""

    def start(self, name: str, role: Role, where: RayVirtualCluster) -> Policy:
        """Start the ranks of a model on bundles, and block until they are ready."""
        weights_path, optimizer_path = saved_paths(name, role, self.resume_path)
        return Policy(
            where,
            role.section,
            self.tokenizer,
            name_prefix="lm_policy" if name == "policy" else name,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            init_optimizer=role.trains,
            init_reference_model=role.keeps_reference,
            timeouts=self.cluster.timeouts,
            threads_per_rank=self.cluster.threads_per_rank,
            busy_engines=self.busy_engines,
            seed=self.seed,
            venv=self.cluster.venvs.get("policy"),
            optimizations=self.cluster.optimizations,
        )


def saved_paths(name: str, role: Role, resume_path: Path | None) -> tuple[Path | None, Path | None]:
    """Return a model's weights and optimizer folders in a checkpoint. An absent folder is None."""
    saved = resume_path / name if resume_path and role.trains else None
    if saved is None or not saved.exists():
        return None, None  # `resume_check` has accepted a checkpoint without this model
    return saved / "weights", saved / "optimizer" if (saved / "optimizer").exists() else None


def turns_of_start(cluster: ClusterConfig, roles: Mapping[str, Role]) -> list[list[str]]:
    """Return lists of models. The models of a list start at the same time. The lists start one after another.

    Models that share GPUs are in different lists. Each leaves the GPUs before the next one starts (`leave_devices`),
    because all optimizers together need more memory than a step. The owner is last, because the policy's weights stay
    there.
    """
    if not cluster.uses_gpu:
        return [list(roles)]
    turns = zip_longest(*(reversed(names) for names in sharing(roles).values()))
    return [[name for name in names if name is not None] for names in turns]


def leave_devices(cluster: ClusterConfig, roles: Mapping[str, Role], models: Mapping[str, Any]) -> None:
    """Move the state of models that share GPUs to host memory. This does nothing on CPUs."""
    groups = sharing(roles).values() if cluster.uses_gpu else ()
    for name in [name for group in groups if len(group) > 1 for name in group if name in models]:
        device_user(name, roles[name], models[name]).rest()


def start_models(
    cluster: ClusterConfig, roles: Mapping[str, Role], starts: Mapping[str, Callable[[], Any]], resources: ExitStack
) -> dict[str, Any]:
    """Start the given engines and the models of a run, and block until all are ready."""
    first, *later = turns_of_start(cluster, roles)
    started: dict[str, Any] = {}
    for names in ([name for name in starts if name not in roles or name in first], *later):
        leave_devices(cluster, roles, started)
        started |= start_together({name: starts[name] for name in names}, resources)
    return started


def replace_ranks(
    cluster: ClusterConfig,
    roles: Mapping[str, Role],
    models: Mapping[str, Policy],
    lost: Collection[str],
    resume_path: Path | None,
) -> None:
    """Replace the ranks of trained models and of frozen models that lost ranks, and block until they are ready.

    Args:
        resume_path: Step folder that trained models load. If None, they load their initial weights.
    """
    ready = {name: models[name] for name, role in roles.items() if not (role.trains or name in lost)}
    for name in roles.keys() - ready.keys():
        models[name].worker_group.end("it is being restarted")  # end all before a new one needs their devices
    for turn in turns_of_start(cluster, roles):
        leave_devices(cluster, roles, ready)
        names = [name for name in turn if name not in ready]
        with ThreadPoolExecutor(max_workers=max(len(names), 1)) as pool:
            starts = [pool.submit(models[name].restart, *saved_paths(name, roles[name], resume_path)) for name in names]
        for start in starts:
            start.result()
        ready |= {name: models[name] for name in names}


def allowed_restarts(cluster: ClusterConfig, checkpointing: CheckpointingConfig) -> int:
    """Return how many times the ranks of a run may be replaced."""
    if cluster.max_run_restarts is None:
        return _RESTARTS_WITH_CHECKPOINTS if checkpointing.enabled else 0
    return cluster.max_run_restarts


class Closable(Protocol):
    """Interface of an object that owns processes."""

    def shutdown(self) -> Any:
        """End the processes."""


def start_together(starts: Mapping[str, Callable[[], Closable]], resources: ExitStack) -> dict[str, Any]:
    """Start several groups of workers in parallel, and block until each has started or failed.

    Args:
        starts: Functions that start the groups, by name.
        resources: Stack that ends the started groups in reverse order, also if another start fails.

    Raises:
        Exception: The first failure. Its notes name the other failures.
    """
    with ThreadPoolExecutor(max_workers=len(starts)) as pool:
        futures = {name: pool.submit(start) for name, start in starts.items()}
    failures: dict[str, BaseException] = {}
    for name, future in futures.items():
        failure = future.exception()
        if failure is None:
            resources.callback(future.result().shutdown)
        else:
            failures[name] = failure
    if failures:
        (first, failure), *others = failures.items()
        failure.add_note(f"This kept {first!r} from starting.")
        for name, other in others:
            failure.add_note(f"{name!r} did not start either: {type(other).__name__}: {other}")
        raise failure
    return {name: future.result() for name, future in futures.items()}


def reserve(
    clusters: Iterable[RayVirtualCluster],
    checkpointing: CheckpointingConfig,
    models: Mapping[str, Role],
    resources: ExitStack,
) -> None:
    """Reserve all bundles of a run, and compare their nodes before the first worker starts.

    Raises:
        ResourceInsufficientError: the cluster does not have the bundles.
        ConfigError, DeadlineExceededError: raised by `node_checks.check_nodes`.
    """
    different = list({id(cluster): cluster for cluster in clusters}.values())
    for cluster in different:
        resources.callback(cluster.shutdown)
        cluster.get_placement_groups()
    check_nodes(different, _shared(checkpointing, models))


def _shared(checkpointing: CheckpointingConfig, models: Mapping[str, Role]) -> Shared:
    """Return the folders that every machine of a run must be able to read."""
    folders: dict[str, str] = {}
    for name, role in models.items():
        section = role.section
        folders |= {f"{name}.model_name": section.model_name, f"{name}.tokenizer.name": section.tokenizer.name}
    if not checkpointing.enabled:
        return Shared(folders)
    # # Paths must be absolute, because workers may have another working directory. `load_config` has already made the
    # folders of models absolute.
    saved = Path(checkpointing.checkpoint_dir).absolute()
    return Shared(folders, ("checkpointing.checkpoint_dir", str(saved)))
