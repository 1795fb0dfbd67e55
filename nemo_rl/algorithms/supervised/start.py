"""Starts a run from the recipe of a supervised algorithm (data, policy, validation, session) and draws its batches.

`sft`, `dpo`, `kto` and `rm` build a `SupervisedRecipe` with their differences; `Setup` is their common `setup`. Order
as in `rollout.start`: all checks first, then Ray and the policy's ranks, then the parts that connect them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing, saved_models, share_memory
from nemo_rl.algorithms.runtime.recovery import Connection, Recovery
from nemo_rl.algorithms.runtime.run import Phase, Run, Stage, StepBatch
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.throughput import Throughput
from nemo_rl.algorithms.runtime.validations import InTurn
from nemo_rl.algorithms.setup.memory_forecast import log_memory, memory_of_a_rank
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import (
    allowed_restarts,
    place_models,
    replace_ranks,
    reserve,
    start_models,
    start_role,
)
from nemo_rl.algorithms.setup.run_folders import RunFolders, open_folders
from nemo_rl.algorithms.setup.start_budget import StartBudget
from nemo_rl.algorithms.setup.user_parts import UserParts
from nemo_rl.config import DPOConfig, Role, SupervisedMasterConfig, public_values
from nemo_rl.data.collate_fn import preference_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.mixed_stream import training_stream
from nemo_rl.data.streams.prompt_stream import GroupRewards, Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.cluster.machine_monitor import monitored
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.loss_calls import join_updates
from nemo_rl.utils.logger import Logger

type Batch = BatchedDataDict[Any]
type Validate = Callable[[int], dict[str, float]]
"""Step -> metrics of a validation."""


@dataclass(frozen=True)
class LossValidator:
    """Computes a loss on held-out data."""

    batches: Iterable[Batch]
    """Validation batches, iterated again for each validation."""
    stages: Sequence[Stage]
    """As in training."""
    policy: PolicyInterface
    memory: MemorySharing
    """Gives the stages and the policy their devices, where several models share them."""
    loss_fn: LossFunction
    micro_batch_rows: int | None = None
    """Rows of one pass of a rank; None forms passes as in training."""
    names: tuple[tuple[str, str], ...] | None = None
    """Names in the report by the names of the loss's metrics; None reports all."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return metrics of the whole validation, with summed counts and other metrics averaged by these counts."""
        batches = []
        for batch in self.batches:
            prepared = StepBatch(batch)
            for stage in self.stages:
                self.memory.hand_to(stage.roles)
                stage.apply(prepared)
            self.memory.hand_to(("policy",))
            result = self.policy.train(
                prepared.tensors, self.loss_fn, eval_mode=True, gbs=batch.size, mbs=self.micro_batch_rows
            )
            batches.append(result["metrics"])
        metrics = join_updates(batches, self.loss_fn)
        if self.names is None:
            return metrics
        return {reported: metrics[name] for name, reported in self.names}


@dataclass(frozen=True)
class SeparateValidations:
    """Validates on several data sets separately."""

    whole: Validate | None
    """Validates on the rows without a name; None if there are none."""
    named: Mapping[str, Validate]
    """Validates on the rows of a name; their metric `m` is reported as `validation-<name>/m`."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics of all data sets."""
        metrics = {} if self.whole is None else self.whole(step)
        for name, validate in self.named.items():
            metrics |= {f"validation-{name}/{metric}": value for metric, value in validate(step).items()}
        return metrics


logger = logging.getLogger(__name__)

type Collate = Callable[[list[Any]], BatchedDataDict[Any]]
type ValidationBatches = Iterable[BatchedDataDict[Any]]


@dataclass(frozen=True)
class SupervisedRecipe:
    """The parts of a supervised run that depend on its algorithm, built before anything starts."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of model and data."""
    data: RunData
    """Rows to train and validate on."""
    collate: Collate
    """Joins data into a batch."""
    loss_fn: LossFunction
    """The training loss."""
    roles: Mapping[str, Role]
    """Models by name; "policy" is trained on `loss_fn`."""
    rows_per_sample: int = 1
    """Rows of a batch that one sample takes; 2 for pairs."""
    stages: Callable[[Mapping[str, Policy]], list[Stage]] = lambda models: []
    """Builds, from the started models, the stages that a batch goes through before training or validation."""
    validator: Callable[[Policy, ValidationBatches], Validate] | None = None
    """Makes of policy and batches a function that validates after a step; None reports the loss."""
    validated_names: tuple[tuple[str, str], ...] | None = None
    """Metrics of the loss that a validation reports, see `LossValidator.names`."""


@dataclass(frozen=True)
class Setup[Config: SupervisedMasterConfig]:
    """The function `setup` of a supervised algorithm."""

    schema: type[Config]
    """The master config class of the algorithm."""
    recipe: Callable[[Config, UserParts], SupervisedRecipe]
    """Makes the recipe of configuration and user-supplied parts."""

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
        """Build a run of the algorithm and start its workers, with the arguments and errors of `grpo.setup`."""
        user_parts = UserParts(tokenizer, train_dataset, val_dataset, loss_fn=loss_fn)
        config = user_parts.checked(master_config, self.schema)
        return start_run(config, self.recipe(config, user_parts), started_at)


class WrittenBatches:
    """Draws batches of written rows, each one optimizer update, as a `runtime.run.BatchSource`.

    Args:
        rows: batches, epoch after epoch.
        rows_per_sample: rows of a batch that one sample takes; 2 for pairs.
    """

    def __init__(self, rows: Prompts, rows_per_sample: int):
        self._rows = rows
        self._rows_per_sample = rows_per_sample

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """See `BatchSource.next_batch`."""
        with phase("data_processing"):
            batch = self._rows.next_batch()
        tensors = batch.rows
        num_samples = tensors.size // self._rows_per_sample
        rewards: GroupRewards = dict.fromkeys(batch.positions, ())
        metrics = {"total_num_tokens": float(tensors["input_lengths"].sum()), "num_samples": float(num_samples)}
        return StepBatch(
            tensors,
            num_prompts=num_samples,
            metrics=metrics | self._rows.metrics(rewards),
            rows_per_update=tensors.size,
            prompts=batch.positions,
            rewards=rewards,
        )

    def trained(self, step: int, batch: StepBatch) -> None:
        """See `BatchSource.trained`."""
        self._rows.acknowledge(batch.prompts)
        self._rows.finish_step(step, batch.rewards)


def start_run(config: SupervisedMasterConfig, recipe: SupervisedRecipe, started_at: float = 0.0) -> Run:
    """Start Ray and the policy's ranks, and connect them, with arguments and errors as in `rollout.start.start_run`."""
    budget = StartBudget(started_at)
    check_added_models(config, recipe.roles)
    rows = make_rows(config, recipe)
    steps = num_steps(config, rows.batches_per_epoch)
    with ExitStack() as resources:
        folders = open_folders(config, recipe.roles, recipe.data.train, resources)
        folders.check_position(rows)
        backends = Logger(config.logger, folders.log_dir, steps)
        resources.callback(backends.close)
        backends.log_hyperparams(public_values(config, "python"))
        available = memory_of_a_rank(config.cluster)
        log_memory(config.cluster, recipe.roles, available, recipe.rows_per_sample)
        models = _start_models(config, recipe, folders, resources, budget)
        resources.enter_context(monitored(config.logger, backends))

        def connect(resume_path: Path | None, rows: Prompts, started_at: float) -> Connection:
            memory, policy = share_memory(config.cluster, recipe.roles, models), models["policy"]
            parts = SessionParts(
                cadence=_cadence(config, steps),
                logger=backends,
                checkpointing=config.checkpointing,
                checkpoints=folders.checkpoints,
                models=saved_models(recipe.roles, models, memory),
                source=rows,
                validation=_validation(config, recipe, models, memory),
                run_config=config,
                throughput=Throughput.of(policy, config.policy.precision, policy.layout.num_ranks, config.cluster),
            )
            session = Session(parts, resume_path, started_at)
            source = WrittenBatches(rows, recipe.rows_per_sample)
            return Connection(session, source, recipe.stages(models), memory)

        with budget.phase("session"):
            first = connect(folders.resume_path, rows, started_at)
        budget.log(backends)
        resources.push(folders.record_end)
        return Run(
            session=first.session,
            source=first.source,
            stages=first.stages,
            roles=models,
            loss_fn=recipe.loss_fn,
            memory=first.memory,
            resources=resources.pop_all(),
            recover=Recovery(
                max_restarts=allowed_restarts(config),
                models=models,
                newest_checkpoint=folders.newest_checkpoint,
                replace_ranks=partial(replace_ranks, config.cluster, recipe.roles, models),
                connect=lambda resume_path: connect(resume_path, make_rows(config, recipe), 0.0),
                metrics=backends,
                connection=first,
            ),
        )


def make_rows(config: SupervisedMasterConfig, recipe: SupervisedRecipe) -> Prompts:
    """Build the stream of training rows."""
    return training_stream(config, recipe.data.train, config.policy.train_global_batch_size, recipe.collate)


def _start_models(
    config: SupervisedMasterConfig,
    recipe: SupervisedRecipe,
    folders: RunFolders,
    resources: ExitStack,
    budget: StartBudget,
) -> dict[str, Policy]:
    """Start Ray and the ranks of all models, and block until they are ready."""
    cluster, seed = config.cluster, config.algorithm.seed
    with budget.phase("downloads"):
        download_models(model.model_name for _, _, model in config.model_keys())
    with budget.phase("Ray"):
        init_ray(str(folders.log_dir), optimizations=cluster.optimizations)
    with budget.phase("machines reserved and compared"):
        places = place_models(cluster, recipe.roles)
        reserve(places.values(), config, recipe.roles, resources)
    starts = {
        name: partial(start_role, name, role, places[name], cluster, recipe.tokenizer, seed, folders.resume_path)
        for name, role in recipe.roles.items()
    }
    with budget.phase("models"):
        models = start_models(cluster, recipe.roles, starts, resources)
    for name, model in models.items():
        budget.add_workers(name, model.worker_group.start_phases)
    return models


def num_steps(config: SupervisedMasterConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of a run: `max_num_steps`, or the steps of all epochs if that is less."""
    asked, epochs = config.algorithm.max_num_steps, config.algorithm.max_num_epochs
    available = steps_per_epoch * epochs
    if asked > available:
        logger.info(
            "The data has %d steps in max_num_epochs=%d; max_num_steps=%d is not reached.", available, epochs, asked
        )
    return available if asked < 0 else min(asked, available)


def validation_rows(config: SupervisedMasterConfig, rows_per_sample: int) -> int | None:
    """Return the rows of one validation pass, None if packing or dynamic batching is on."""
    policy = config.policy
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return None
    return config.algorithm.val_micro_batch_size * rows_per_sample


def _validation(
    config: SupervisedMasterConfig, recipe: SupervisedRecipe, models: Mapping[str, Policy], memory: MemorySharing
) -> InTurn | None:
    stages, policy = recipe.stages(models), models["policy"]

    def validate(rows: MixedDataset) -> Validate:
        batches = _validation_batches(config, rows, recipe)
        if recipe.validator is not None:
            return recipe.validator(policy, batches)
        micro_batch_rows = validation_rows(config, recipe.rows_per_sample)
        return LossValidator(batches, stages, policy, memory, recipe.loss_fn, micro_batch_rows, recipe.validated_names)

    whole = None if recipe.data.validation is None else validate(recipe.data.validation)
    named = {name: validate(rows) for name, rows in recipe.data.named_validation.items()}
    validation = SeparateValidations(whole, named) if named else whole
    if validation is None:
        return None

    def on_its_devices(step: int) -> dict[str, float]:
        memory.hand_to(("policy",))
        return validation(step)

    return InTurn(on_its_devices)


def _validation_batches(
    config: SupervisedMasterConfig, rows: MixedDataset, recipe: SupervisedRecipe
) -> ValidationBatches:
    algorithm = config.algorithm
    batch_size = min(algorithm.val_global_batch_size, len(rows))
    return build_loader(
        rows,
        batch_size,
        shuffle=False,
        seed=algorithm.seed,
        drop_last=False,
        collate_fn=recipe.collate,
        max_rows=None if algorithm.val_batches < 0 else algorithm.val_batches * batch_size,
    )


def _cadence(config: SupervisedMasterConfig, steps: int) -> Cadence:
    algorithm = config.algorithm
    return Cadence(
        max_num_steps=steps,
        val_period=algorithm.val_period,
        val_at_start=algorithm.val_at_start,
        val_at_end=algorithm.val_at_end,
        save_period=config.checkpointing.save_period,
        max_idle_steps=algorithm.max_idle_steps,
    )


def collate_pairs(config: SupervisedMasterConfig, tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Return a function that joins pairs: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one."""
    return collate_by(preference_collate_fn, config, tokenizer, add_loss_mask=True)


def collate_by(
    function: Callable[..., BatchedDataDict[Any]],
    config: SupervisedMasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> Collate:
    """Bind the run's tokenizer, the multiple of row lengths and options to a function of `data.collate_fn`."""
    multiple = config.policy.make_sequence_length_divisible_by
    return partial(function, tokenizer=tokenizer, make_sequence_length_divisible_by=multiple, **options)


def from_section[T](kind: type[T], section: DPOConfig) -> T:
    """Make a dataclass from the keys of a section that are its fields."""
    return kind(**{field.name: getattr(section, field.name) for field in fields(kind)})  # type: ignore[arg-type]
