"""Start a run of any algorithm: checks, folders, machines, workers, and the parts that connect them.

The `recipe` of an algorithm makes the choices that need no worker. `start_run` does all other work, in this order:

    checks ─► folders, trackers ─► Ray ─► environments (in background) ─┬► engines (import vLLM, build) ─┐
              open_run             start_machines                       ├► policy ranks ─────────────────┼─► session
                                                                        └► ranks of further models ──────┘
                                                                          start_workers               RunParts.connect

Runs that do not sample have no environments and no engines. Engines that share GPUs with the policy start alone and go
to sleep before a model starts, because an engine chooses the size of its cache by the free memory of the device.

Invariants: this module contains no code of losses or advantages. Each part that was started is registered for shutdown
before the next part starts.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.reward_shaping import scale_rewards
from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.rollout.ahead import with_overlap
from nemo_rl.algorithms.rollout.batches import RolloutBatches, StoredVersion, build_training_batch
from nemo_rl.algorithms.rollout.environments import (
    check_environments,
    make_runner,
    start_environments,
    try_own_environments,
)
from nemo_rl.algorithms.rollout.refit import Engines, shared_engines
from nemo_rl.algorithms.rollout.source import DynamicSampling, FreshRollouts, RolloutSource, drawn_prompts, wrap_source
from nemo_rl.algorithms.rollout.sync_setup import make_probe, make_refitter
from nemo_rl.algorithms.rollout.validation import ValidationReport, make_validation
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing, saved_models, share_memory
from nemo_rl.algorithms.runtime.recovery import BuiltSource, Connection, Recovery
from nemo_rl.algorithms.runtime.run import Run
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.step_record import StepRecorder
from nemo_rl.algorithms.runtime.throughput import Throughput, engine_load
from nemo_rl.algorithms.runtime.validations import InTurn, Validation
from nemo_rl.algorithms.setup.memory_forecast import log_memory, memory_of_a_rank
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import (
    RankStarter,
    allowed_restarts,
    place_models,
    replace_ranks,
    reserve,
    start_models,
    start_together,
)
from nemo_rl.algorithms.setup.run_folders import RunFolders, open_folders
from nemo_rl.algorithms.setup.start_budget import StartBudget
from nemo_rl.algorithms.setup.user_parts import UserParts
from nemo_rl.algorithms.supervised import (
    LossValidator,
    SupervisedValidation,
    Validate,
    WrittenBatches,
    validation_batches,
    validation_rows,
)
from nemo_rl.config import (
    RewardedTrainingConfig,
    RolloutMasterConfig,
    SupervisedMasterConfig,
    busy_engines,
    public_values,
)
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.streams.mixed_stream import training_stream
from nemo_rl.data.streams.prompt_stream import Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.cluster.machine_monitor import monitored
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import ShownAnswers, TrajectoryLog
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import check_engine_model, engine_settings, make_engines, sampling_params
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.logger import Logger

logger = logging.getLogger(__name__)

type TrainingConfig = RolloutMasterConfig | SupervisedMasterConfig
"""Configuration of a run that samples its training answers, or of a run that trains on written rows."""


@dataclass(frozen=True)
class SupervisedSetup[Config: SupervisedMasterConfig]:
    """Signature of the function `setup` of an algorithm that trains on written rows."""

    schema: type[Config]
    recipe: Callable[[Config, UserParts], Recipe]
    """Function that makes the recipe from the configuration and user-supplied parts."""

    def __call__(
        self,
        master_config: Config | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        started_at: float = 0.0,
    ) -> Run:
        """Build a run of the algorithm and start its workers. Arguments and errors are those of `grpo.setup`."""
        user_parts = UserParts(tokenizer, train_dataset, val_dataset, loss_fn=loss_fn)
        config = user_parts.checked(master_config, self.schema)
        return start_run(config, self.recipe(config, user_parts), started_at)


def start_run(config: TrainingConfig, recipe: Recipe, started_at: float = 0.0) -> Run:
    """Start Ray and all workers of a run, and connect them.

    Args:
        config: A checked configuration.
        recipe: The choices of the algorithm.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError, CheckpointError: The configuration, the data, a tracker or a checkpoint cannot be used.
            These errors are raised before Ray starts.
        ResourceInsufficientError: The cluster has fewer resources than requested.
    """
    budget = StartBudget(started_at)
    check_recipe(config, recipe)
    rows = open_rows(config, recipe)
    with ExitStack() as resources:
        plan = open_run(config, recipe, rows, resources)
        machines = start_machines(plan, resources, budget)
        workers = start_workers(plan, machines, resources, budget)
        resources.enter_context(monitored(config.logger, plan.metrics))
        parts = RunParts(plan, workers, threads=resources.enter_context(ExitStack()))
        with budget.phase("rollouts and session" if config.samples else "session"):
            first = parts.connect(rows, plan.folders.resume_path, started_at)
        budget.log(plan.metrics)
        resources.push(plan.folders.record_end)
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
            recover=Recovery(allowed_restarts(config.cluster, config.checkpointing), parts, plan.metrics, first),
        )


def check_recipe(config: TrainingConfig, recipe: Recipe) -> None:
    """Check models and environments that a recipe adds to the configuration, before anything is opened."""
    check_added_models(config, recipe.roles)
    if isinstance(config, RolloutMasterConfig):
        check_engine_model(config.policy, config.cluster)
        tasks = recipe.data.task_env.values()
        check_environments(config.env, config.cluster, tasks, recipe.sampling.environments)


def open_rows(config: TrainingConfig, recipe: Recipe) -> Prompts:
    """Build the stream of training prompts or rows, at the beginning of the data."""
    if isinstance(config, RolloutMasterConfig):
        return training_stream(config, recipe.data.train, drawn_prompts(config.algorithm), recipe.collate)
    return training_stream(config, recipe.data.train, config.policy.train_global_batch_size, recipe.collate)


@dataclass(frozen=True)
class RunPlan:
    """A checked run with open folders, before anything is started."""

    config: TrainingConfig
    recipe: Recipe
    folders: RunFolders
    metrics: Logger
    num_steps: int
    """Number of the last step."""


def open_run(config: TrainingConfig, recipe: Recipe, rows: Prompts, resources: ExitStack) -> RunPlan:
    """Open the folders and trackers of a run, and compare its predicted memory with the machines' memory."""
    steps = num_steps(config, rows)
    folders = open_folders(config, recipe.roles, recipe.data.train, resources)
    folders.check_position(rows)
    metrics = Logger(config.logger, folders.log_dir, steps)
    resources.callback(metrics.close)
    metrics.log_hyperparams(public_values(config, "python"))
    log_memory(config.model_cluster, recipe.roles, memory_of_a_rank(config.cluster), recipe.rows_per_sample)
    return RunPlan(config, recipe, folders, metrics, steps)


def num_steps(config: TrainingConfig, rows: Prompts) -> int:
    """Return `max_num_steps` or, for written rows, the number of steps of all epochs if it is smaller."""
    asked = config.algorithm.max_num_steps
    if isinstance(config, RolloutMasterConfig):
        return asked
    epochs = config.algorithm.max_num_epochs
    available = rows.batches_per_epoch * epochs
    if asked > available:
        logger.info(
            "The data has %d steps in max_num_epochs=%d; max_num_steps=%d is not reached.", available, epochs, asked
        )
    return available if asked < 0 else min(asked, available)


@dataclass(frozen=True)
class Machines:
    """The reserved machines of a run, and its environments."""

    places: Mapping[str, RayVirtualCluster]
    """Resource bundles of each model, and of "generation"."""
    environments: Mapping[str, Environment]
    """Environments by task name."""


def start_machines(plan: RunPlan, resources: ExitStack, budget: StartBudget) -> Machines:
    """Start Ray, reserve all machines, and start environments in the background."""
    config, recipe = plan.config, plan.recipe
    with budget.phase("downloads"):
        download_models(model.model_name for _, _, model in config.model_keys())
    with budget.phase("Ray"):
        init_ray(str(plan.folders.log_dir), optimizations=config.cluster.optimizations)
    with budget.phase("machines reserved and compared"):
        environments: dict[str, Environment] = {}
        if isinstance(config, RolloutMasterConfig):
            tasks, own = recipe.data.task_env.values(), recipe.sampling.environments
            environments = start_environments(config.env, config.cluster, tasks, own, resources)
            try_own_environments(environments, recipe.data, config.cluster.timeouts.setup_s)
        places = place_models(config.model_cluster, recipe.roles)
        reserve(places.values(), config.checkpointing, recipe.roles, resources)
    return Machines(places, environments)


@dataclass(frozen=True)
class RunWorkers:
    """The processes of a run."""

    models: Mapping[str, Policy]
    """Controllers of the models, by role."""
    engines: EngineGroup | None
    """Generation engines. None if the run does not sample."""
    environments: Mapping[str, Environment]


def start_workers(plan: RunPlan, machines: Machines, resources: ExitStack, budget: StartBudget) -> RunWorkers:
    """Start engines and models, and block until they are ready."""
    config, roles, cluster, seed = plan.config, plan.recipe.roles, plan.config.cluster, plan.config.algorithm.seed
    starts: dict[str, Callable[[], Any]] = {}
    started: dict[str, Any] = {}
    busy = 0
    if isinstance(config, RolloutMasterConfig):
        settings = engine_settings(config.policy, cluster, seed, load_weights=False)
        file = config.policy.sampling.num_engines_file
        samples = config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
        place = machines.places["generation"]
        starts["generation"] = partial(make_engines, settings, place, cluster, file, samples=samples)
        busy = busy_engines(config.algorithm.overlap, cluster, config.policy)
        if settings.can_sleep:
            with budget.phase("engines"):
                started = start_together(starts, resources)
                Engines(started["generation"], cluster.timeouts.weight_sync_s).rest()
            starts = {}
    starter = RankStarter(cluster, plan.recipe.tokenizer, seed, plan.folders.resume_path, busy)
    phase = "engines and models" if starts else "models"
    starts |= {name: partial(starter.start, name, roles[name], machines.places[name]) for name in reversed(list(roles))}
    with budget.phase(phase):
        started |= start_models(config.model_cluster, roles, starts, resources)
    engines: EngineGroup | None = started.get("generation")
    if engines is not None:
        budget.add_workers("generation", engines.workers.start_phases)
    for name in roles:
        budget.add_workers(name, started[name].worker_group.start_phases)
    return RunWorkers({name: started[name] for name in roles}, engines, machines.environments)


@dataclass(frozen=True)
class Batches:
    """The source of a run's batches, and its validation."""

    source: BuiltSource
    validation: Validation | None
    """Validation of the run. None without validation data."""


@dataclass(frozen=True)
class RunParts:
    """Connect the workers of a run with its session, also after ranks were replaced (`recovery.Restartable`)."""

    plan: RunPlan
    workers: RunWorkers
    threads: ExitStack
    """Stack that ends the threads of the connected parts."""

    @property
    def models(self) -> Mapping[str, Policy]:
        """All models by name."""
        return self.workers.models

    def newest_checkpoint(self) -> Path | None:
        """Return the step folder to continue from, or None to begin again at step 1."""
        return self.plan.folders.newest_checkpoint()

    def replace_ranks(self, lost: Collection[str], resume_path: Path | None) -> None:
        """Restart dead engines, free devices that the engines share, and replace ranks by `roles.replace_ranks`."""
        config, engines = self.plan.config, self.workers.engines
        self.threads.close()
        if engines is not None:
            engines.reopen()
        shared = shared_engines(config.policy, config.cluster, engines)
        if shared is not None and config.cluster.uses_gpu:
            shared.rest()
        replace_ranks(config.model_cluster, self.plan.recipe.roles, self.models, lost, resume_path)

    def rebuild(self, resume_path: Path | None) -> Connection:
        """Connect the workers again, for a run that continues from a step folder."""
        return self.connect(open_rows(self.plan.config, self.plan.recipe), resume_path)

    def connect(self, rows: Prompts, resume_path: Path | None, started_at: float = 0.0) -> Connection:
        """Build the parts in the controller. `Session` gets the arguments."""
        config, recipe, models = self.plan.config, self.plan.recipe, self.models
        policy, overlaps = models["policy"], False
        engines = shared_engines(config.policy, config.cluster, self.workers.engines)
        memory = share_memory(config.cluster, recipe.roles, models, engines)
        if isinstance(config, RolloutMasterConfig):
            batches, overlaps = self._sampled(config, rows, memory), config.algorithm.overlap.mode != "none"
        else:
            batches = self._written(config, rows, memory)
        stages = recipe.stages(models)
        parts = SessionParts(
            cadence=cadence_of(config, self.plan.num_steps),
            logger=self.plan.metrics,
            checkpointing=config.checkpointing,
            checkpoints=self.plan.folders.checkpoints,
            models=saved_models(recipe.roles, models, memory),
            source=rows,
            validation=batches.validation,
            run_config=config,
            throughput=Throughput.of(
                policy,
                config.policy.precision,
                policy.layout.num_ranks,
                config.cluster,
                samples_in_phase=not overlaps,
            ),
        )
        session = Session(parts, resume_path, started_at)
        trainer = None if recipe.trainer is None else recipe.trainer(models, session)
        return Connection(session, batches.source, stages, memory, trainer)

    def _sampled(self, config: RolloutMasterConfig, prompts: Prompts, memory: MemorySharing) -> Batches:
        """Build the source that samples the batches of a run, and the validation by rollouts."""
        recipe, workers, log_dir = self.plan.recipe, self.workers, self.plan.folders.log_dir
        algorithm, policy, engines, threads = config.algorithm, self.models["policy"], workers.engines, self.threads
        assert engines is not None, "a run that samples has engines"
        runner = make_runner(config, recipe.tokenizer, engines, workers.environments, recipe.sampling.review, threads)
        refitter = make_refitter(config.policy, config.cluster, policy, engines, memory)
        refitter.before_update.append(runner.wait_for_groups)
        prompts.attach("weights", StoredVersion(policy))
        shown = ShownAnswers(config.logger.num_answers_on_terminal, config.logger.answers_on_terminal_period)
        eos, log = recipe.tokenizer.eos_token_id, TrajectoryLog(log_dir, config.logger.save_trajectories, shown)
        fresh = FreshRollouts(
            prompts,
            runner,
            sampling_params(config.policy, eos, validation=False),
            algorithm.num_generations_per_prompt,
            algorithm.seed,
        )
        source = RolloutBatches(
            rollouts=source_of(config, fresh),
            prompts=prompts,
            refitter=refitter,
            probe=make_probe(config.policy, config.cluster, policy, engines, refitter),
            layout=layout_of(config, recipe),
            trajectory_log=log,
            idle=IdleShares(runner.busy_seconds),
            engine_load=engine_load(config.policy, engines, threads),
            recorder=StepRecorder(log_dir, config, policy, recipe.loss_fn) if config.logger.record_steps else None,
            tasks=sorted(workers.environments),
            samples_per_update=config.policy.train_global_batch_size,
            mixes_weights=config.policy.mixes_weights,
        )
        sampling = sampling_params(config.policy, eos, validation=True)
        report = ValidationReport(log, config.logger.num_val_samples_to_print)
        return Batches(source, make_validation(recipe.data, algorithm, sampling, runner, report, refitter))

    def _written(self, config: SupervisedMasterConfig, rows: Prompts, memory: MemorySharing) -> Batches:
        """Build the source that draws the batches of a run from written rows, and the validation by the loss."""
        recipe, algorithm = self.plan.recipe, config.algorithm
        stages = recipe.stages(self.models)

        def validator(held_out: MixedDataset) -> Validate:
            of_loss = LossValidator(
                validation_batches(algorithm, held_out, recipe.collate),
                stages,
                self.models["policy"],
                memory,
                recipe.loss_fn,
                validation_rows(config.policy, algorithm, recipe.rows_per_sample),
                recipe.validated_names,
            )
            return of_loss if recipe.validator is None else recipe.validator(of_loss)

        data = recipe.data
        whole = None if data.validation is None else validator(data.validation)
        named = {name: validator(held_out) for name, held_out in data.named_validation.items()}
        validation = InTurn(SupervisedValidation(whole, named, memory)) if whole is not None or named else None
        return Batches(WrittenBatches(rows, recipe.rows_per_sample), validation)


def source_of(config: RolloutMasterConfig, fresh: FreshRollouts) -> RolloutSource:
    """Build the source of groups: `fresh`, wrapped for overlap, dynamic sampling and the user's source as configured.

    Dynamic sampling compares scaled rewards, because advantages are computed from scaled rewards.
    """
    algorithm = config.algorithm
    source = with_overlap(fresh, algorithm)
    if isinstance(algorithm, RewardedTrainingConfig) and algorithm.use_dynamic_sampling:
        source = DynamicSampling(
            source,
            algorithm.num_prompts_per_step,
            algorithm.dynamic_sampling_max_gen_batches,
            partial(scale_rewards, config=algorithm.reward_scaling),
        )
    section = algorithm.rollout_source
    key = next((key for key, part in config.named_parts.items() if part is section), "rollout_source")
    return wrap_source(source, section, key)


def layout_of(config: RolloutMasterConfig, recipe: Recipe) -> Callable[[Sequence[Trajectory]], BatchedDataDict[Any]]:
    """Return `build_training_batch` with all arguments bound except the trajectories."""
    return partial(
        build_training_batch,
        pad_token_id=recipe.tokenizer.pad_token_id,
        mask_truncated=config.algorithm.overlong_filtering,
        needs_reward=recipe.sampling.needs_reward,
    )


def cadence_of(config: TrainingConfig, steps: int) -> Cadence:
    """Return the steps at which a run validates, saves and stops."""
    algorithm = config.algorithm
    cadence = Cadence(
        max_num_steps=steps,
        val_period=algorithm.val_period,
        val_at_start=algorithm.val_at_start,
        val_at_end=algorithm.val_at_end,
        save_period=config.checkpointing.save_period,
        max_idle_steps=algorithm.max_idle_steps,
    )
    if isinstance(config, SupervisedMasterConfig):
        return cadence
    return replace(
        cadence,
        val_start_at=config.algorithm.val_start_at,
        stop_metric=config.algorithm.stop_at_validation_metric,
        stop_threshold=config.algorithm.stop_at_validation_threshold,
    )
