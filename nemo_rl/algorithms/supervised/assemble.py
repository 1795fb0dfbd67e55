"""From a configuration to the parts of an SFT, DPO or reward-model run.

As `assemble` does for GRPO, and with the same order: everything that can be refused without a worker
(tokenizer, data, loss), then Ray and the policy's ranks, then what connects them.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.dpo import ReferenceLogprobs
from nemo_rl.algorithms.kto import KTOPreparation
from nemo_rl.algorithms.rm import RMValidator
from nemo_rl.algorithms.runtime.run_folders import open_folders
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.workers import PolicyStart, make_clusters, start_policy
from nemo_rl.algorithms.sft import VALIDATION_NAMES
from nemo_rl.algorithms.supervised.loop import (
    LossValidator,
    Prepare,
    SeparateValidations,
    SupervisedRun,
    Validate,
    unchanged,
)
from nemo_rl.config import (
    DPOConfig,
    DPOMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
    SupervisedMasterConfig,
)
from nemo_rl.data.collate_fn import feedback_collate_fn, preference_collate_fn, sft_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.setup import (
    RunData,
    setup_feedback_data,
    setup_preference_data,
    setup_sft_data,
)
from nemo_rl.data.loader import PromptLoader, build_loader
from nemo_rl.data.tokenizer import ensure_distinct_pad_token, get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.experience.prompt_stream import PromptStream
from nemo_rl.losses.feedback import KTOLossConfig, KTOLossFn
from nemo_rl.losses.interfaces import LossFunction
from nemo_rl.losses.likelihood import NLLLossFn
from nemo_rl.losses.pair_losses import CentredMargin
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn, PreferenceLossFn
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.seed import set_seed

logger = logging.getLogger(__name__)

type ValidationBatches = Iterable[BatchedDataDict[Any]]


@dataclass(frozen=True)
class Recipe:
    """What makes a supervised run SFT, DPO or reward-model training.

    Attributes:
        collate: joins data into a batch.
        loss_fn: the loss.
        rows_per_sample: rows of a batch that one sample takes.
        needs_reference: keep the initial weights.
        prepare: policy -> what happens to a batch before it is trained on.
        validator: policy and batches -> a function that validates after a step.
    """

    collate: Callable[[list[Any]], BatchedDataDict[Any]]
    loss_fn: LossFunction
    rows_per_sample: int
    needs_reference: bool
    prepare: Callable[[Policy], Prepare]
    validator: Callable[[Policy, ValidationBatches], Validate]


def assemble_sft(config: SFTMasterConfig, started_at: float = 0.0) -> SupervisedRun:
    """Build an SFT run.

    Args:
        config: a checked configuration.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used; raised before Ray starts.
        ResourceInsufficientError: the cluster lacks what is asked for.
    """
    set_seed(config.sft.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_sft_data(tokenizer, config.data)
    loss_fn = NLLLossFn()
    recipe = Recipe(
        collate=partial(
            sft_collate_fn,
            tokenizer=tokenizer,
            make_sequence_length_divisible_by=config.policy.make_sequence_length_divisible_by,
            only_unmask_final=config.sft.only_unmask_final,
        ),
        loss_fn=loss_fn,
        rows_per_sample=1,
        needs_reference=False,
        prepare=lambda policy: unchanged,
        validator=lambda policy, batches: LossValidator(
            batches, unchanged, policy, loss_fn, validation_rows(config, 1), VALIDATION_NAMES
        ),
    )
    return assemble_run(config, tokenizer, data, recipe, started_at)


def assemble_dpo(config: DPOMasterConfig, started_at: float = 0.0) -> SupervisedRun:
    """Build a DPO run, also with the loss of KTO; arguments and errors as `assemble_sft`."""
    set_seed(config.dpo.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    if config.dpo.preference_loss == "kto":
        data = setup_feedback_data(tokenizer, config.data)
        return assemble_run(config, tokenizer, data, _kto_recipe(config, tokenizer), started_at)
    data = setup_preference_data(tokenizer, config.data)
    loss_fn = DPOLossFn(_loss_config(DPOLossConfig, config.dpo))

    def prepare(policy: Policy) -> Prepare:
        return ReferenceLogprobs(policy) if loss_fn.needs_reference else unchanged

    recipe = Recipe(
        collate=_pair_collate(config, tokenizer),
        loss_fn=loss_fn,
        rows_per_sample=2,
        needs_reference=loss_fn.needs_reference,
        prepare=prepare,
        validator=lambda policy, batches: LossValidator(
            batches, prepare(policy), policy, loss_fn, validation_rows(config, 2)
        ),
    )
    return assemble_run(config, tokenizer, data, recipe, started_at)


def assemble_rm(config: RMMasterConfig, started_at: float = 0.0) -> SupervisedRun:
    """Build a reward-model run; arguments and errors as `assemble_sft`."""
    set_seed(config.rm.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    ensure_distinct_pad_token(tokenizer)
    # A program that loads the model finds the end of a padded sequence by this token.
    overrides = {"pad_token_id": tokenizer.pad_token_id} | (config.policy.hf_config_overrides or {})
    config.policy.hf_config_overrides = overrides
    data = setup_preference_data(tokenizer, config.data)
    loss_fn = PreferenceLossFn(CentredMargin(config.rm.margin, config.rm.center_rewards_coefficient))
    recipe = Recipe(
        collate=_pair_collate(config, tokenizer),
        loss_fn=loss_fn,
        rows_per_sample=2,
        needs_reference=False,
        prepare=lambda policy: unchanged,
        validator=lambda policy, batches: RMValidator(batches, policy, loss_fn, validation_rows(config, 2)),
    )
    return assemble_run(config, tokenizer, data, recipe, started_at)


def _kto_recipe(config: DPOMasterConfig, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    loss_fn = KTOLossFn(_loss_config(KTOLossConfig, config.dpo))

    def prepare(policy: Policy) -> Prepare:
        return KTOPreparation(policy, config.policy.max_total_sequence_length)

    return Recipe(
        collate=partial(
            feedback_collate_fn,
            tokenizer=tokenizer,
            make_sequence_length_divisible_by=config.policy.make_sequence_length_divisible_by,
        ),
        loss_fn=loss_fn,
        rows_per_sample=1,
        needs_reference=True,
        prepare=prepare,
        validator=lambda policy, batches: LossValidator(
            batches, prepare(policy), policy, loss_fn, validation_rows(config, 1)
        ),
    )


def _loss_config[T: (DPOLossConfig, KTOLossConfig)](kind: type[T], dpo: DPOConfig) -> T:
    """The keys of `dpo` that the loss needs."""
    return kind(**{field.name: getattr(dpo, field.name) for field in fields(kind)})


def _pair_collate(
    config: SupervisedMasterConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[Any]], BatchedDataDict[Any]]:
    return partial(
        preference_collate_fn,
        tokenizer=tokenizer,
        make_sequence_length_divisible_by=config.policy.make_sequence_length_divisible_by,
        add_loss_mask=True,
    )


def assemble_run(
    config: SupervisedMasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: RunData,
    recipe: Recipe,
    started_at: float,
) -> SupervisedRun:
    """Start the workers of a run and connect its parts."""
    loader = _train_loader(config, data, recipe)
    steps = num_steps(config, len(loader))
    batches = PromptStream(loader, config.algorithm.max_num_epochs)
    folders = open_folders(config, len(data.train))
    backends = Logger(config.logger, folders.log_dir, steps)
    backends.log_hyperparams(config.model_dump())
    with ExitStack() as undo:
        undo.callback(backends.close)
        init_ray(str(folders.log_dir))
        clusters = make_clusters(config.cluster, config.policy)
        start = PolicyStart(config.algorithm.seed, folders.resume_path, recipe.needs_reference)
        policy = start_policy(clusters[0], config.policy, config.cluster, tokenizer, start)
        parts = SessionParts(
            cadence=_cadence(config, steps),
            logger=backends,
            checkpoints=folders.checkpoints,
            policy=policy,
            data=batches,
            validate=_validation(config, data, recipe, policy),
            run_config=config,
            save_optimizer=config.checkpointing.save_optimizer,
            save_consolidated=config.checkpointing.save_consolidated,
            must_save_by=config.checkpointing.checkpoint_must_save_by,
            signal_grace_s=config.checkpointing.signal_grace_s,
        )
        run = SupervisedRun(
            session=Session(parts, folders.resume_path, started_at),
            batches=batches,
            prepare=recipe.prepare(policy),
            policy=policy,
            loss_fn=recipe.loss_fn,
            rows_per_sample=recipe.rows_per_sample,
            closers=(backends.close, policy.shutdown, *(cluster.shutdown for cluster in clusters)),
        )
        undo.pop_all()
    return run


def num_steps(config: SupervisedMasterConfig, steps_per_epoch: int) -> int:
    """Steps of a run: `max_num_steps`, or all epochs where that is less."""
    asked, epochs = config.algorithm.max_num_steps, config.algorithm.max_num_epochs
    available = steps_per_epoch * epochs
    if asked > available:
        logger.info(
            "The data has %d steps in max_num_epochs=%d; max_num_steps=%d is not reached.", available, epochs, asked
        )
    return available if asked < 0 else min(asked, available)


def validation_rows(config: SupervisedMasterConfig, rows_per_sample: int) -> int | None:
    """Rows of one validation pass, None where packing or dynamic batching forms the passes."""
    policy = config.policy
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return None
    return config.algorithm.val_micro_batch_size * rows_per_sample


def _train_loader(config: SupervisedMasterConfig, data: RunData, recipe: Recipe) -> PromptLoader:
    return build_loader(
        data.train,
        config.policy.train_global_batch_size,
        shuffle=config.data.shuffle,
        seed=config.algorithm.seed,
        num_workers=config.data.num_workers,
        collate_fn=recipe.collate,
        accept_changes=bool(config.checkpointing.allow_changed),
        max_bad_row_share=config.data.max_bad_row_share,
    )


def _validation(config: SupervisedMasterConfig, data: RunData, recipe: Recipe, policy: Policy) -> Validate | None:
    def validate(rows: MixedDataset) -> Validate:
        return recipe.validator(policy, _validation_batches(config, rows, recipe))

    whole = None if data.validation is None else validate(data.validation)
    named = {name: validate(rows) for name, rows in data.named_validation.items()}
    return SeparateValidations(whole, named) if named else whole


def _validation_batches(config: SupervisedMasterConfig, rows: MixedDataset, recipe: Recipe) -> ValidationBatches:
    algorithm = config.algorithm
    batch_size = min(algorithm.val_global_batch_size, len(rows))
    return build_loader(
        rows,
        batch_size,
        shuffle=False,
        seed=algorithm.seed,
        drop_last=False,
        max_rows=None if algorithm.val_batches < 0 else algorithm.val_batches * batch_size,
        collate_fn=recipe.collate,
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
