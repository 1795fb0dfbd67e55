"""From a configuration to the parts of a run.

The only place that knows which class serves which key; what elsewhere would be an `if` in a loop is a value
chosen here. Order: everything that can be refused without a worker (tokenizer, data, loss), then Ray and the
workers, then what connects them. Law: below this file no code sees a raw configuration dict, and nothing that
can be refused early is refused late.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit import CreditAssignment
from nemo_rl.algorithms.grpo import GRPORun
from nemo_rl.algorithms.refit import Refitter
from nemo_rl.algorithms.rollout_source import DynamicSampling, FreshRollouts, RolloutSource
from nemo_rl.algorithms.scoring import PolicyScoring
from nemo_rl.algorithms.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.validation import Validator, limited
from nemo_rl.algorithms.workers import PolicyStart, make_refitter, start_environments, start_workers
from nemo_rl.config import GRPOMasterConfig, MasterConfig, save_resolved
from nemo_rl.data.datasets.setup import ResponseData, setup_response_data
from nemo_rl.data.loader import build_loader
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.prompt_stream import PromptStream
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.generation.factory import sampling_params
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger, get_next_experiment_dir, print_message_log_samples
from nemo_rl.utils.seed import set_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolders:
    """Where a run writes, and where it goes on from.

    Attributes:
        log_dir: this run's `exp_NNN`.
        checkpoints: None when checkpointing is off.
        resume_path: newest checkpoint, None to start fresh.
    """

    log_dir: Path
    checkpoints: CheckpointManager | None
    resume_path: Path | None


def open_folders(config: MasterConfig) -> RunFolders:
    """Make the log folder, store the resolved configuration in it, and look for a checkpoint."""
    checkpoints = CheckpointManager(config.checkpointing) if config.checkpointing.enabled else None
    latest = checkpoints.get_latest_checkpoint_path() if checkpoints is not None else None
    log_dir = Path(get_next_experiment_dir(config.logger.log_dir))
    save_resolved(config, log_dir / "config.yaml")
    logger.info("Logs of this run: %s", log_dir)
    return RunFolders(log_dir, checkpoints, None if latest is None else Path(latest))


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
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, list(config.env))
    loss_fn = ClippedPGLossFn(config.loss_fn)
    credit = CreditAssignment(make_advantage_estimator(config.grpo, config.loss_fn), config.grpo)
    needs_prev, needs_reference = forward_passes(config, loss_fn, credit)
    folders = open_folders(config)

    init_ray(str(folders.log_dir))
    environments = start_environments(data.task_env.values(), config.env, config.cluster)
    start = PolicyStart(config.grpo.seed, folders.resume_path, needs_reference)
    workers = start_workers(config.policy, config.cluster, tokenizer, start, environments)
    loop = EventLoopThread()
    limits = RolloutLimits(
        config.policy.max_total_sequence_length,
        config.grpo.max_rollout_turns,
        config.cluster.timeouts.rollout_s,
    )
    runner = RolloutRunner(workers.generation, environments, tokenizer, limits, loop)
    refitter = make_refitter(config.policy, config.cluster, workers)
    prompts = make_prompts(config, data)
    trajectory_log = TrajectoryLog(folders.log_dir, config.logger.save_trajectories)
    backends = Logger(config.logger, folders.log_dir, config.grpo.max_num_steps)
    backends.log_hyperparams(config.model_dump())
    parts = SessionParts(
        cadence=_cadence(config),
        logger=backends,
        checkpoints=folders.checkpoints,
        policy=workers.policy,
        data=prompts,
        validate=_validation(config, data, runner, refitter, tokenizer, trajectory_log),
        run_config=config,
        save_optimizer=config.checkpointing.save_optimizer,
        must_save_by=config.checkpointing.checkpoint_must_save_by,
    )
    return GRPORun(
        session=Session(parts, folders.resume_path, started_at),
        refitter=refitter,
        source=_source(config, prompts, runner, tokenizer),
        scoring=PolicyScoring(workers.policy, needs_prev, needs_reference, config.grpo.seq_logprob_error_threshold),
        credit=credit,
        policy=workers.policy,
        loss_fn=loss_fn,
        trajectory_log=trajectory_log,
        pad_token_id=tokenizer.pad_token_id,
        mask_truncated=config.grpo.overlong_filtering,
        closers=(backends.close, loop.close, workers.close),
    )


def forward_passes(config: GRPOMasterConfig, loss_fn: ClippedPGLossFn, credit: CreditAssignment) -> tuple[bool, bool]:
    """Whether a run needs `prev_logprobs` and reference log-probabilities; see `algorithms.scoring`."""
    grpo = config.grpo
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    several_updates = samples > config.policy.train_global_batch_size
    on_policy = config.loss_fn.force_on_policy_ratio or not several_updates
    needs_prev = not on_policy or grpo.seq_logprob_error_threshold is not None
    return needs_prev or credit.needs_logprobs, loss_fn.needs_reference or credit.needs_logprobs


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
        if config.logger.num_val_samples_to_print:
            logs = [t.message_log for t in trajectories]
            rewards = [t.reward if t.reward is not None else math.nan for t in trajectories]
            print_message_log_samples(logs, rewards, config.logger.num_val_samples_to_print, step)
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
