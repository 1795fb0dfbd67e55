"""Start a run of an algorithm that samples: workers, rollouts, weight sync, validation, session.

`grpo`, `ppo` and `distillation` decide what can be decided without a worker (a `RolloutRecipe`) and call `start_run`.
Order: all checks, then Ray and the workers, then the parts that connect them:

    Ray ─► environments (in background) ─┬► engines (import vLLM, build) ─┐
                                         ├► policy ranks ─────────────────┼─► refitter, rollouts, session
                                         └► ranks of further models ──────┘

Engines that share GPUs with the policy start alone and go to sleep before a model starts, because an engine sizes its
cache by the free memory of the device.

Invariant: nothing here knows a loss or an advantage; each part that was started is registered for shutdown before the
next part starts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.rollout.batches import RolloutBatches, StoredVersion, build_training_batch
from nemo_rl.algorithms.rollout.environments import check_environments, start_environments, try_own_environments
from nemo_rl.algorithms.rollout.refit import Engines, Refitter
from nemo_rl.algorithms.rollout.runners import check_runners, make_runner
from nemo_rl.algorithms.rollout.source import FreshRollouts, RolloutSource
from nemo_rl.algorithms.rollout.sync_setup import make_probe, make_refitter
from nemo_rl.algorithms.rollout.validation import ValidationReport, Validator, make_validation
from nemo_rl.algorithms.runtime.device_sharing import saved_models, share_memory
from nemo_rl.algorithms.runtime.recovery import Connection, Recovery
from nemo_rl.algorithms.runtime.run import Run, Stage, Trainer
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.step_record import StepRecorder
from nemo_rl.algorithms.runtime.throughput import Throughput, engine_load
from nemo_rl.algorithms.runtime.validations import Validation
from nemo_rl.algorithms.setup.memory_forecast import log_memory, memory_of_a_rank
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import (
    allowed_restarts,
    place_models,
    replace_ranks,
    reserve,
    start_models,
    start_role,
    start_together,
)
from nemo_rl.algorithms.setup.run_folders import RunFolders, open_folders
from nemo_rl.algorithms.setup.start_budget import StartBudget
from nemo_rl.config import Role, RolloutMasterConfig, busy_engines, public_values
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.mixed_stream import training_stream
from nemo_rl.data.streams.prompt_stream import Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.cluster.machine_monitor import monitored
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.rollouts import RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import (
    check_engine_model,
    engine_settings,
    make_engines,
    sampling_params,
)
from nemo_rl.models.generation.registry import engine_kind
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.logger import Logger


def as_sampled(rollouts: FreshRollouts) -> RolloutSource:
    """Return the source of an algorithm that trains on every group."""
    return rollouts


@dataclass(frozen=True)
class RolloutRecipe:
    """The choices of an algorithm that samples, complete before anything starts."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of all models and of the data."""
    data: RunData
    """Prompts."""
    loss_fn: AnyLossFunction
    """Loss that the policy is trained on."""
    roles: Mapping[str, Role]
    """Models by name; "policy" is trained on `loss_fn` and sampled from."""
    stages: Callable[[Mapping[str, Any]], list[Stage]]
    """Builds the stages of a step from the started models, or from objects that score as they do."""
    source: Callable[[FreshRollouts], RolloutSource] = as_sampled
    """Wraps the source of freshly sampled groups."""
    trainer: Callable[[Mapping[str, Any], Callable[[], int]], Trainer] | None = None
    """Builds what makes the updates, from the started models and a function that returns the running step; None: the
    policy does."""
    prompt_factor: float = 1.0
    """Prompts drawn at a time, divided by `num_prompts_per_step`."""
    needs_reward: bool = True
    """Whether samples without a reward are excluded from the loss."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """User-supplied environments by task name, used instead of those in `env`; see `rollout.environments`."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """Notes on finished samples."""


@dataclass(frozen=True)
class Workers:
    """The processes of a run that trains and samples."""

    models: Mapping[str, Policy]
    """Controllers of the models, by role."""
    engines: EngineGroup
    """Generation engines."""
    environments: Mapping[str, Environment]
    """Environments by task name."""


def start_run(config: RolloutMasterConfig, recipe: RolloutRecipe, started_at: float = 0.0) -> Run:
    """Start Ray and all workers, and connect them.

    Args:
        config: a checked configuration.
        recipe: the algorithm's choices.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError, CheckpointError: the configuration, the data, a tracker or a checkpoint cannot be
            used; raised before Ray starts.
        ResourceInsufficientError: the cluster has fewer resources than requested.
    """
    budget = StartBudget(started_at)
    check_added_models(config, recipe.roles)
    check_engine_model(config.policy, config.cluster)
    check_environments(config, recipe.data.task_env.values(), recipe.environments)
    check_runners(config, recipe.environments)
    prompts = make_prompts(config, recipe)
    with ExitStack() as resources:
        folders = open_folders(config, recipe.roles, recipe.data.train, resources)
        folders.check_position(prompts)
        backends = Logger(config.logger, folders.log_dir, config.algorithm.max_num_steps)
        resources.callback(backends.close)
        backends.log_hyperparams(public_values(config, "python"))
        log_memory(config.model_cluster, recipe.roles, memory_of_a_rank(config.cluster))
        workers = _start_workers(config, recipe, folders, resources, budget)
        resources.enter_context(monitored(config.logger, backends))
        threads = resources.enter_context(ExitStack())
        connect = partial(_connect, config, recipe, folders, backends, workers, threads)
        with budget.phase("rollouts and session"):
            first = connect(folders.resume_path, prompts, started_at)
        budget.log(backends)
        resources.push(folders.record_end)
        return Run(
            session=first.session,
            source=first.source,
            stages=first.stages,
            roles=workers.models,
            loss_fn=recipe.loss_fn,
            memory=first.memory,
            resources=resources.pop_all(),
            generation=workers.engines,
            trainer=first.trainer,
            recover=Recovery(
                max_restarts=allowed_restarts(config),
                models=workers.models,
                newest_checkpoint=folders.newest_checkpoint,
                replace_ranks=partial(_replace_ranks, config, recipe.roles, workers),
                connect=lambda resume_path: connect(resume_path, make_prompts(config, recipe), 0.0),
                metrics=backends,
                connection=first,
                threads=threads,
            ),
        )


def _replace_ranks(
    config: RolloutMasterConfig,
    roles: Mapping[str, Role],
    workers: Workers,
    lost: Collection[str],
    resume_path: Path | None,
) -> None:
    """Replace ranks of models as `roles.replace_ranks`, with engines that work, but hold no shared device."""
    workers.engines.reopen()
    engines = shared_engines(config, workers.engines)
    if engines is not None and config.cluster.uses_gpu:
        engines.rest()
    replace_ranks(config.model_cluster, roles, workers.models, lost, resume_path)


def _start_workers(
    config: RolloutMasterConfig,
    recipe: RolloutRecipe,
    folders: RunFolders,
    resources: ExitStack,
    budget: StartBudget,
) -> Workers:
    """Start environments in the background, then engines and models, and block until engines and models are ready."""
    cluster, seed = config.cluster, config.algorithm.seed
    with budget.phase("downloads"):
        download_models(model.model_name for _, _, model in config.model_keys())
    with budget.phase("Ray"):
        init_ray(str(folders.log_dir), optimizations=cluster.optimizations)
    with budget.phase("machines reserved and compared"):
        environments = start_environments(config, recipe.data.task_env.values(), recipe.environments, resources)
        try_own_environments(environments, recipe.data, cluster.timeouts.setup_s)
        places = place_models(config.model_cluster, recipe.roles)
        reserve(places.values(), config, recipe.roles, resources)
    settings = engine_settings(config.policy, cluster, seed, load_weights=False)
    assert config.policy.generation is not None, "engine_settings checks this"
    file = config.policy.generation.num_engines_file
    samples = config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
    start_engines = partial(make_engines, settings, places["generation"], cluster, file, samples=samples)
    engines = {"generation": start_engines}
    busy = busy_engines(config.algorithm.overlap, cluster, config.policy)
    models = {
        name: partial(start_role, name, role, places[name], cluster, recipe.tokenizer, seed, folders.resume_path, busy)
        for name, role in reversed(list(recipe.roles.items()))
    }
    if settings.can_sleep:
        with budget.phase("engines"):
            started = start_together(engines, resources)
            Engines(started["generation"], cluster.timeouts.weight_sync_s).rest()
        with budget.phase("models"):
            started |= start_models(config.model_cluster, recipe.roles, models, resources)
    else:
        with budget.phase("engines and models"):
            started = start_models(config.model_cluster, recipe.roles, {**engines, **models}, resources)
    budget.add_workers("generation", started["generation"].workers.start_phases)
    for name in recipe.roles:
        budget.add_workers(name, started[name].worker_group.start_phases)
    return Workers({name: started[name] for name in recipe.roles}, started["generation"], environments)


def _connect(
    config: RolloutMasterConfig,
    recipe: RolloutRecipe,
    folders: RunFolders,
    backends: Logger,
    workers: Workers,
    threads: ExitStack,
    resume_path: Path | None,
    prompts: Prompts,
    started_at: float,
) -> Connection:
    """Build the parts of a run around its workers, with `threads` to end the threads that they start."""
    loop = EventLoopThread()
    threads.callback(loop.close)
    algorithm, cluster, policy = config.algorithm, config.cluster, workers.models["policy"]
    runner = make_runner(config, recipe.tokenizer, workers.engines, workers.environments, loop, threads, recipe.review)
    memory = share_memory(cluster, recipe.roles, workers.models, shared_engines(config, workers.engines))
    refitter = make_refitter(config.policy, cluster, policy, workers.engines, memory)
    refitter.before_update.append(runner.wait_for_groups)
    prompts.attach("weights", StoredVersion(policy))
    trajectory_log = TrajectoryLog(folders.log_dir, config.logger.save_trajectories)
    layout, idle = layout_of(config, recipe), IdleShares(runner.busy_seconds)
    groups = recipe.source(_fresh_rollouts(config, recipe, prompts, runner))
    stages = recipe.stages(workers.models)
    source = RolloutBatches(
        groups,
        prompts,
        refitter,
        make_probe(config.policy, cluster, policy, workers.engines, refitter),
        trajectory_log,
        layout,
        idle,
        engine_load(config.policy, workers.engines, threads),
        sorted(workers.environments),
        config.policy.train_global_batch_size,
        StepRecorder(folders.log_dir, config, policy, recipe.loss_fn) if config.logger.record_steps else None,
        config.policy.mixes_weights,
    )
    parts = SessionParts(
        cadence=_cadence(config),
        logger=backends,
        checkpointing=config.checkpointing,
        checkpoints=folders.checkpoints,
        models=saved_models(recipe.roles, workers.models, memory),
        source=prompts,
        validation=validation_of(config, recipe, runner, refitter, trajectory_log),
        run_config=config,
        throughput=Throughput.of(
            policy,
            config.policy.precision,
            policy.layout.num_ranks,
            cluster,
            samples_in_phase=algorithm.overlap.mode == "none",
        ),
    )
    session = Session(parts, resume_path, started_at)
    trainer: Trainer | None = None
    if recipe.trainer is not None:
        trainer = recipe.trainer(workers.models, lambda: session.step)
    return Connection(session, source, stages, memory, trainer, was_changed=lambda: source.rollouts is not groups)


def _fresh_rollouts(
    config: RolloutMasterConfig, recipe: RolloutRecipe, prompts: Prompts, runner: RolloutRunner
) -> FreshRollouts:
    return FreshRollouts(
        prompts,
        runner,
        sampling_params(config.policy, recipe.tokenizer.eos_token_id, validation=False),
        config.algorithm.num_generations_per_prompt,
        config.algorithm.seed,
    )


def layout_of(
    config: RolloutMasterConfig, recipe: RolloutRecipe
) -> Callable[[Sequence[Trajectory]], BatchedDataDict[Any]]:
    """Return `build_training_batch` with all arguments but the trajectories."""
    return partial(
        build_training_batch,
        pad_token_id=recipe.tokenizer.pad_token_id,
        mask_truncated=config.algorithm.overlong_filtering,
        needs_reward=recipe.needs_reward,
    )


def shared_engines(config: RolloutMasterConfig, engines: EngineGroup) -> Engines | None:
    """The engines as a user of shared memory, or None where they have their own devices."""
    generation = config.policy.generation
    assert generation is not None, "engine_settings checks this"
    if not generation.colocated.enabled:
        return None
    drops_weights = engine_kind(generation.backend).drops_weights(generation)
    return Engines(engines, config.cluster.timeouts.weight_sync_s, drops_weights)


def make_prompts(config: RolloutMasterConfig, recipe: RolloutRecipe) -> Prompts:
    """Build the stream of training prompts."""
    num_prompts = int(config.algorithm.num_prompts_per_step * recipe.prompt_factor)
    return training_stream(config, recipe.data.train, num_prompts)


def validation_of(
    config: RolloutMasterConfig,
    recipe: RolloutRecipe,
    runner: RolloutRunner,
    refitter: Refitter,
    trajectory_log: TrajectoryLog,
) -> Validation | None:
    """Build the validation of a run, or return None without validation data."""
    data = recipe.data.all_validation
    if data is None:
        return None
    algorithm = config.algorithm
    rows = data.first_rows(algorithm.max_val_samples or len(data))
    batch_size = min(algorithm.val_batch_size or len(rows), len(rows))
    loader = build_loader(rows, batch_size, shuffle=False, seed=algorithm.seed, drop_last=False)
    validator = Validator(
        loader,
        runner,
        sampling_params(config.policy, recipe.tokenizer.eos_token_id, validation=True),
        algorithm.val_num_generations_per_prompt,
        algorithm.seed,
        sorted(set(recipe.data.task_env.values())),
        data.name_of,
    )
    report = ValidationReport(trajectory_log, config.logger.num_val_samples_to_print)
    return make_validation(algorithm.overlap, validator, report, refitter)


def _cadence(config: RolloutMasterConfig) -> Cadence:
    algorithm = config.algorithm
    return Cadence(
        max_num_steps=algorithm.max_num_steps,
        val_period=algorithm.val_period,
        val_start_at=algorithm.val_start_at,
        val_at_start=algorithm.val_at_start,
        val_at_end=algorithm.val_at_end,
        save_period=config.checkpointing.save_period,
        stop_metric=algorithm.stop_at_validation_metric,
        stop_threshold=algorithm.stop_at_validation_threshold,
        max_idle_steps=algorithm.max_idle_steps,
    )
