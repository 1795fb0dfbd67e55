"""Start the processes of a run: clusters, policy ranks, engines, environments, and the way between them.

Slowest parts start side by side:

    Ray ─┬► engines (import vLLM, build) ─┐
         ├► policy ranks ─────────────────┤─► Workers
         ├► teacher ranks (distillation) ─┤
         └► environments (in background) ─┘

Invariant: sizes and placement follow from `cluster` and `policy` alone (`config.topology`).
"""

import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.refit import KeepBoth, MemorySharing, Refitter, TakeTurns
from nemo_rl.algorithms.sync_probe import ROUNDING, SyncProbe
from nemo_rl.config import (
    ClusterConfig,
    PolicyConfig,
    TeacherConfig,
    plan_topology,
    students_share,
    teachers_share,
)
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.client import EnvironmentClient
from nemo_rl.environments.registry import create_env
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_precision, engine_settings, make_engines
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.utils.closing import close_all
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.interfaces import TransportName, TransportSpec


@dataclass
class Workers:
    """The processes of a run that trains and generates.

    Attributes:
        policy: ranks under training.
        generation: engines.
        environments: by task name.
        clusters: bundles they run in.
        teacher: ranks of the frozen second model, inference only; None for none.
    """

    policy: Policy
    generation: EngineGroup
    environments: Mapping[str, EnvironmentClient] = field(default_factory=dict)
    clusters: list[RayVirtualCluster] = field(default_factory=list)
    teacher: Policy | None = None

    def close(self) -> None:
        """Stop everything, policy first so that its files in shared memory go with it."""
        models = [model for model in (self.policy, self.teacher, self.generation) if model is not None]
        close_all(part.shutdown for part in (*models, *self.environments.values(), *self.clusters))


@dataclass(frozen=True)
class PolicyStart:
    """How the policy of a run starts.

    Attributes:
        seed: run seed.
        resume_path: checkpoint step folder to go on from; None starts from `policy.model_name`.
        needs_reference: keep the initial weights for reference log-probabilities.
        teacher: start this model too, without an optimizer; None for none.
    """

    seed: int
    resume_path: Path | None = None
    needs_reference: bool = False
    teacher: TeacherConfig | None = None


def start_policy(
    where: RayVirtualCluster,
    policy: PolicyConfig,
    cluster: ClusterConfig,
    tokenizer: PreTrainedTokenizerBase,
    start: PolicyStart,
) -> Policy:
    """Start the policy's ranks, from its model or a checkpoint; blocks until they are ready."""
    resume = start.resume_path / "policy" if start.resume_path else None
    has_optimizer = resume is not None and (resume / "optimizer").exists()
    return Policy(
        where,
        policy,
        tokenizer,
        weights_path=resume / "weights" if resume else None,
        optimizer_path=resume / "optimizer" if resume and has_optimizer else None,
        init_reference_model=start.needs_reference,
        timeouts=cluster.timeouts,
        threads_per_rank=cluster.threads_per_rank,
        seed=start.seed,
    )


def start_workers(
    policy: PolicyConfig,
    cluster: ClusterConfig,
    tokenizer: PreTrainedTokenizerBase,
    start: PolicyStart,
    environments: Mapping[str, EnvironmentClient],
) -> Workers:
    """Start engines, policy ranks and teacher ranks side by side; blocks until all are ready."""
    policy_cluster, generation_cluster, teacher_cluster = _all_clusters(cluster, policy, start.teacher)
    clusters = list({id(c): c for c in (policy_cluster, generation_cluster, teacher_cluster)}.values())
    for reserved in clusters:
        reserved.get_placement_groups()
    settings = engine_settings(policy, cluster, start.seed, load_weights=False)
    with ThreadPoolExecutor(max_workers=3) as pool:
        engines = pool.submit(make_engines, settings, generation_cluster, cluster)
        ranks = pool.submit(start_policy, policy_cluster, policy, cluster, tokenizer, start)
        teacher = None
        if start.teacher is not None:
            teacher = pool.submit(start_teacher, teacher_cluster, start.teacher, cluster, tokenizer, start.seed)
        of_teacher = None if teacher is None else teacher.result()
        return Workers(ranks.result(), engines.result(), environments, clusters, of_teacher)


def start_teacher(
    where: RayVirtualCluster,
    teacher: TeacherConfig,
    cluster: ClusterConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Policy:
    """Start the ranks of a frozen model, for inference only; blocks until they are ready."""
    return Policy(
        where,
        teacher,
        tokenizer,
        name_prefix="teacher",
        init_optimizer=False,
        init_reference_model=False,
        timeouts=cluster.timeouts,
        threads_per_rank=cluster.threads_per_rank,
        seed=seed,
    )


def _all_clusters(
    cluster: ClusterConfig, policy: PolicyConfig, teacher: TeacherConfig | None
) -> tuple[RayVirtualCluster, RayVirtualCluster, RayVirtualCluster]:
    """Bundles for policy, generation and teacher; the same object where they share (the policy's without a teacher)."""
    if teacher is None:
        for_policy, for_generation = make_clusters(cluster, policy)
        return for_policy, for_generation, for_policy
    if teacher.colocated.enabled:
        for_policy, for_generation = make_clusters(cluster, policy, guests=1)
        return for_policy, for_generation, for_policy
    share = teachers_share(cluster, teacher.colocated)
    for_teacher = _reserve(share, "teacher", share.num_nodes, share.policy_ranks_per_node, 1)
    for_policy, for_generation = make_clusters(students_share(cluster, teacher.colocated), policy)
    return for_policy, for_generation, for_teacher


def make_clusters(
    cluster: ClusterConfig, policy: PolicyConfig, guests: int = 0
) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Bundles for policy and generation; the same ones twice when they are colocated.

    Args:
        cluster: the machines.
        policy: says where generation runs.
        guests: further worker groups that will share the policy's bundles.
    """
    topology = plan_topology(cluster, policy)
    nodes, per_node = topology.policy_nodes, topology.policy_ranks_per_node
    if policy.generation is not None and policy.generation.colocated.enabled:
        shared = _reserve(cluster, "policy_and_generation", nodes, per_node, 2 + guests)
        return shared, shared
    return (
        _reserve(cluster, "policy", nodes, per_node, 1 + guests),
        _reserve(cluster, "generation", topology.generation_nodes, topology.generation_ranks_per_node, 1),
    )


def _reserve(cluster: ClusterConfig, name: str, nodes: int, per_node: int, groups: int) -> RayVirtualCluster:
    return RayVirtualCluster(
        [per_node] * nodes,
        use_gpus=cluster.uses_gpu,
        max_colocated_worker_groups=groups,
        num_gpus_per_node=max(cluster.gpus_per_node, 1),
        name=name,
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )


def start_environments(
    names: Iterable[str], env: Mapping[str, Any], cluster: ClusterConfig
) -> dict[str, EnvironmentClient]:
    """Start environments by name, in the background.

    Args:
        names: environments that the data asks for.
        env: the `env` section.
        cluster: deadlines and restarts.

    Raises:
        ConfigError: the data asks for an environment that `env` does not describe.
    """
    clients = {}
    for name in names:
        if name not in env:
            raise ConfigError(f"The data asks for environment {name!r}, but `env` has only {sorted(env)}.")
        clients[name] = create_env(
            name,
            env[name],
            step_timeout_s=cluster.timeouts.environment_s,
            max_restarts=cluster.max_actor_restarts,
        )
    return clients


def make_refitter(policy: PolicyConfig, cluster: ClusterConfig, workers: Workers) -> Refitter:
    """Choose the weight transport and how device memory is shared."""
    generation = policy.generation
    assert generation is not None, "engine_settings checks this"
    sync = generation.weight_sync
    timeout_s = cluster.timeouts.weight_sync_s
    colocated = generation.colocated.enabled
    spec = TransportSpec(
        name=choose_transport(sync.transport, cluster, colocated),
        run_id=uuid.uuid4().hex[:12],
        device=cluster.device,
        bucket_size_bytes=sync.bucket_size_mb << 20,
        verify=sync.verify,
        timeout_s=timeout_s,
    )
    stream = PolicyWeightStream(workers.policy, engine_precision(policy), timeout_s)
    memory: MemorySharing = KeepBoth()
    if cluster.uses_gpu and colocated:
        memory = TakeTurns(workers.policy, workers.generation, timeout_s)
    return Refitter(stream, workers.generation, spec, timeout_s, memory)


def make_probe(policy: PolicyConfig, cluster: ClusterConfig, workers: Workers, refitter: Refitter) -> SyncProbe:
    """The check of the first sync."""
    generation = policy.generation
    assert generation is not None, "engine_settings checks this"
    formats = {policy.precision, engine_precision(policy)}
    return SyncProbe(
        workers.policy,
        workers.generation,
        refitter,
        generation.weight_sync.max_mult_prob_error,
        cluster.timeouts.weight_sync_s,
        max(formats, key=ROUNDING.__getitem__),
    )


def choose_transport(asked: str, cluster: ClusterConfig, colocated: bool) -> TransportName:
    """What `weight_sync.transport=auto` means here; `config.checks` refuses what cannot work."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if cluster.uses_gpu:
        return "cuda_ipc" if colocated else "collective"
    return "shared_memory" if cluster.num_nodes == 1 else "collective"
