"""From a configuration to the running parts of a GRPO run.

The only place that knows which class serves which key; what elsewhere would be an `if` in a loop is a value
chosen here. Start-up, slowest parts side by side:

    tokenizer, data (all checks that need no worker) ─► Ray ─┬► engines (import vLLM, build) ─┐
                                                             ├► policy ranks ─────────────────┤─► wire
                                                             └► environments (in background) ─┘

Law: below this file no code sees a raw configuration dict, and nothing that can be refused early is
refused late.
"""

import logging
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit import CreditAssignment
from nemo_rl.algorithms.grpo import GRPORun
from nemo_rl.algorithms.refit import KeepBoth, MemorySharing, Refitter, TakeTurns
from nemo_rl.algorithms.rollout_source import DynamicSampling, FreshRollouts, RolloutSource
from nemo_rl.algorithms.scoring import PolicyScoring
from nemo_rl.algorithms.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.validation import Validator, limited
from nemo_rl.config import (
    ClusterConfig,
    GRPOMasterConfig,
    PolicyConfig,
    find_path,
    plan_topology,
    save_resolved,
)
from nemo_rl.data.datasets.setup import ResponseData, setup_response_data
from nemo_rl.data.loader import build_loader
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.environments.client import EnvironmentClient
from nemo_rl.environments.registry import create_env
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.prompt_stream import PromptStream
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_settings, make_engines, sampling_params
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.logger import Logger, get_next_experiment_dir
from nemo_rl.utils.seed import set_seed
from nemo_rl.weight_sync.interfaces import TransportName, TransportSpec

logger = logging.getLogger(__name__)


@dataclass
class Workers:
    """The processes of a run.

    Attributes:
        policy: ranks under training.
        generation: engines.
        environments: by task name.
        clusters: bundles they sit on.
    """

    policy: Policy
    generation: EngineGroup
    environments: Mapping[str, EnvironmentClient]
    clusters: list[RayVirtualCluster]

    def close(self) -> None:
        """Stop everything, policy first so that its files in shared memory go with it."""
        self.policy.shutdown()
        self.generation.shutdown()
        for environment in self.environments.values():
            environment.shutdown()
        for cluster in self.clusters:
            cluster.shutdown()


def assemble_grpo(config: GRPOMasterConfig, started_at: float = 0.0) -> GRPORun:
    """Build a GRPO run.

    Args:
        config: a checked configuration.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used; raised before Ray starts.
        ResourceInsufficientError: the cluster lacks what is asked for.
    """
    set_seed(config.grpo.seed)
    config = with_local_paths(config)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, list(config.env))
    checkpoints = CheckpointManager(config.checkpointing) if config.checkpointing.enabled else None
    resume_path = _latest(checkpoints)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    credit = CreditAssignment(make_advantage_estimator(config.grpo, config.loss_fn), config.grpo)
    scoring_needs = _scoring_needs(config, loss_fn, credit)
    log_dir = Path(get_next_experiment_dir(config.logger.log_dir))
    save_resolved(config, log_dir / "config.yaml")

    init_ray(str(log_dir))
    workers = start_workers(config, tokenizer, data, resume_path, scoring_needs["needs_reference"])
    loop = EventLoopThread()
    limits = RolloutLimits(
        config.policy.max_total_sequence_length,
        config.grpo.max_rollout_turns,
        config.cluster.timeouts.rollout_s,
    )
    runner = RolloutRunner(workers.generation, workers.environments, tokenizer, limits, loop)
    refitter = make_refitter(config, workers)
    prompts = make_prompts(config, data)
    trajectory_log = TrajectoryLog(log_dir, config.logger.save_trajectories)
    backends = Logger(config.logger, log_dir, config.grpo.max_num_steps)
    backends.log_hyperparams(config.model_dump())
    session = Session(
        SessionParts(
            cadence=_cadence(config),
            logger=backends,
            checkpoints=checkpoints,
            policy=workers.policy,
            data=prompts,
            validate=_validation(config, data, runner, refitter, tokenizer, trajectory_log),
            run_config=config,
            save_optimizer=config.checkpointing.save_optimizer,
            must_save_by=config.checkpointing.checkpoint_must_save_by,
        ),
        resume_path,
        started_at,
    )
    return GRPORun(
        session=session,
        refitter=refitter,
        source=_source(config, prompts, runner, tokenizer),
        scoring=PolicyScoring(
            workers.policy,
            max_sequence_error=config.grpo.seq_logprob_error_threshold,
            **scoring_needs,
        ),
        credit=credit,
        policy=workers.policy,
        loss_fn=loss_fn,
        trajectory_log=trajectory_log,
        pad_token_id=tokenizer.pad_token_id,
        mask_truncated=config.grpo.overlong_filtering,
        closers=(backends.close, loop.close, workers.close),
    )


def with_local_paths(config: GRPOMasterConfig) -> GRPOMasterConfig:
    """A copy in which model and tokenizer folders are absolute, since workers run in other folders."""
    policy = config.policy.model_copy(deep=True)
    policy.model_name = str(find_path(policy.model_name) or policy.model_name)
    policy.tokenizer.name = str(find_path(policy.tokenizer.name) or policy.tokenizer.name)
    return config.model_copy(update={"policy": policy})


def _latest(checkpoints: CheckpointManager | None) -> Path | None:
    path = checkpoints.get_latest_checkpoint_path() if checkpoints is not None else None
    return None if path is None else Path(path)


def _scoring_needs(config: GRPOMasterConfig, loss_fn: ClippedPGLossFn, credit: CreditAssignment) -> dict[str, bool]:
    """Which forward passes besides the update's own a run needs; see `algorithms.scoring`."""
    grpo = config.grpo
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    several_updates = samples > config.policy.train_global_batch_size
    on_policy = config.loss_fn.force_on_policy_ratio or not several_updates
    needs_prev = not on_policy or grpo.seq_logprob_error_threshold is not None
    return {
        "needs_prev": needs_prev or credit.needs_logprobs,
        "needs_reference": loss_fn.needs_reference or credit.needs_logprobs,
    }


def start_workers(
    config: GRPOMasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: ResponseData,
    resume_path: Path | None,
    needs_reference: bool,
) -> Workers:
    """Start engines, policy ranks and environments side by side; blocks until all are ready."""
    policy_cluster, generation_cluster = make_clusters(config.cluster, config.policy)
    clusters = list({id(c): c for c in (policy_cluster, generation_cluster)}.values())
    for cluster in clusters:
        cluster.get_placement_groups()
    settings = engine_settings(config.policy, config.cluster, config.grpo.seed, load_weights=False)
    generation_config = config.policy.generation
    assert generation_config is not None, "engine_settings checks this"
    environments = make_environments(config, data)

    def start_policy() -> Policy:
        resume = resume_path / "policy" if resume_path else None
        has_optimizer = resume is not None and (resume / "optimizer").exists()
        return Policy(
            policy_cluster,
            config.policy,
            tokenizer,
            weights_path=resume / "weights" if resume else None,
            optimizer_path=resume / "optimizer" if resume and has_optimizer else None,
            init_reference_model=needs_reference,
            timeouts=config.cluster.timeouts,
            threads_per_rank=config.cluster.threads_per_rank,
            seed=config.grpo.seed,
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        engines = pool.submit(
            make_engines,
            settings,
            generation_cluster,
            config.cluster,
            generation_config.vllm_cfg.env_vars,
        )
        policy = pool.submit(start_policy)
        return Workers(policy.result(), engines.result(), environments, clusters)


def make_clusters(cluster: ClusterConfig, policy: PolicyConfig) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Bundles for policy and generation; the same ones twice when they are colocated."""
    topology = plan_topology(cluster, policy)
    colocated = policy.generation is not None and policy.generation.colocated.enabled

    def reserve(name: str, nodes: int, per_node: int, groups: int) -> RayVirtualCluster:
        return RayVirtualCluster(
            [per_node] * nodes,
            use_gpus=cluster.uses_gpu,
            max_colocated_worker_groups=groups,
            num_gpus_per_node=max(cluster.gpus_per_node, 1),
            name=name,
            port_range_low=cluster.master_port_range_low,
            port_range_high=cluster.master_port_range_high,
        )

    if colocated:
        shared = reserve("policy_and_generation", topology.policy_nodes, topology.policy_ranks_per_node, 2)
        return shared, shared
    return (
        reserve("policy", topology.policy_nodes, topology.policy_ranks_per_node, 1),
        reserve("generation", topology.generation_nodes, topology.generation_ranks_per_node, 1),
    )


def make_environments(config: GRPOMasterConfig, data: ResponseData) -> Mapping[str, EnvironmentClient]:
    """Start the environments that the data asks for.

    Raises:
        ConfigError: data asks for an environment that `env` does not describe.
    """
    clients = {}
    for task_name, env_name in data.task_env.items():
        if env_name not in config.env:
            raise ConfigError(f"The data asks for environment {env_name!r}, but `env` has only {sorted(config.env)}.")
        clients[task_name] = create_env(
            env_name,
            config.env[env_name],
            step_timeout_s=config.cluster.timeouts.environment_s,
            max_restarts=config.cluster.max_actor_restarts,
        )
    return clients


def make_refitter(config: GRPOMasterConfig, workers: Workers) -> Refitter:
    """Choose the weight transport and how device memory is shared."""
    generation = config.policy.generation
    assert generation is not None, "engine_settings checks this"
    sync = generation.weight_sync
    timeout_s = config.cluster.timeouts.weight_sync_s
    spec = TransportSpec(
        name=choose_transport(sync.transport, config.cluster, generation.colocated.enabled),
        run_id=uuid.uuid4().hex[:12],
        device=config.cluster.device,
        bucket_size_bytes=sync.bucket_size_mb << 20,
        verify=sync.verify,
        timeout_s=timeout_s,
    )
    precision = generation.vllm_cfg.precision
    dtype = config.policy.precision if precision == "auto" else precision
    stream = PolicyWeightStream(workers.policy, dtype, timeout_s)
    memory: MemorySharing = KeepBoth()
    if config.cluster.uses_gpu and generation.colocated.enabled:
        memory = TakeTurns(workers.policy, workers.generation, timeout_s)
    return Refitter(stream, workers.generation, spec, timeout_s, memory)


def choose_transport(asked: str, cluster: ClusterConfig, colocated: bool) -> TransportName:
    """What `weight_sync.transport=auto` means here.

    Raises:
        ConfigError: the transport that was asked for cannot work on these devices.
    """
    if asked == "auto":
        if cluster.uses_gpu:
            return "cuda_ipc" if colocated else "collective"
        return "shared_memory" if cluster.num_nodes == 1 else "collective"
    if asked == "cuda_ipc" and not (cluster.uses_gpu and colocated):
        raise ConfigError(
            "policy.generation.weight_sync.transport=cuda_ipc needs cluster.device=cuda and "
            "policy.generation.colocated.enabled=true. Use auto."
        )
    if asked == "shared_memory" and cluster.num_nodes > 1 and not colocated:
        raise ConfigError(
            "policy.generation.weight_sync.transport=shared_memory needs trainers and engines on the "
            "same machine. Use auto or collective."
        )
    return asked  # type: ignore[return-value]


def make_prompts(config: GRPOMasterConfig, data: ResponseData) -> PromptStream:
    """The training prompts, epoch after epoch."""
    grpo = config.grpo
    multiplier = grpo.batch_multiplier if grpo.use_dynamic_sampling else 1
    loader = build_loader(
        data.train,
        int(grpo.num_prompts_per_step * multiplier),
        shuffle=config.data.shuffle,
        seed=grpo.seed,
        num_workers=config.data.num_workers,
    )
    return PromptStream(loader, grpo.max_num_epochs)


def _source(
    config: GRPOMasterConfig,
    prompts: PromptStream,
    runner: RolloutRunner,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutSource:
    grpo = config.grpo
    fresh = FreshRollouts(
        prompts.next_batch,
        runner,
        sampling_params(config.policy, tokenizer.eos_token_id, validation=False),
        grpo.num_generations_per_prompt,
        grpo.seed,
    )
    if not grpo.use_dynamic_sampling:
        return fresh
    return DynamicSampling(fresh, grpo.num_prompts_per_step, grpo.dynamic_sampling_max_gen_batches)


def _validation(
    config: GRPOMasterConfig,
    data: ResponseData,
    runner: RolloutRunner,
    refitter: Refitter,
    tokenizer: PreTrainedTokenizerBase,
    trajectory_log: TrajectoryLog,
) -> Callable[[int], dict[str, float]] | None:
    """A function that validates after a step, or None without validation data."""
    if data.validation is None:
        return None
    grpo = config.grpo
    num_rows = min(len(data.validation), grpo.max_val_samples or len(data.validation))
    batch_size = min(grpo.val_batch_size or num_rows, num_rows)
    loader = build_loader(data.validation, batch_size, shuffle=False, seed=grpo.seed, drop_last=False)
    validator = Validator(
        limited(loader, num_rows // batch_size),
        runner,
        sampling_params(config.policy, tokenizer.eos_token_id, validation=True),
        grpo.val_num_generations_per_prompt,
        grpo.seed,
    )

    def validate(step: int) -> dict[str, float]:
        refitter.ensure_fresh()
        metrics, trajectories = validator.validate()
        trajectory_log.write_validation(step, trajectories)
        return metrics

    return validate


def _cadence(config: GRPOMasterConfig) -> Cadence:
    grpo = config.grpo
    return Cadence(
        max_num_steps=grpo.max_num_steps,
        val_period=grpo.val_period,
        val_start_at=grpo.val_start_at,
        val_at_start=grpo.val_at_start,
        val_at_end=grpo.val_at_end,
        save_period=config.checkpointing.save_period,
        stop_metric=grpo.stop_at_validation_metric,
        stop_threshold=grpo.stop_at_validation_threshold,
    )
