"""The parts that GRPO and distillation have in common: workers, rollouts, weight sync, validation, session.

`assemble` and `assemble_distillation` decide what can be decided without a worker, call `start_rollouts`, and add what
makes the algorithm. Invariant: nothing here knows a loss or an advantage.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.rollout_source import FreshRollouts
from nemo_rl.algorithms.rollout.sync_probe import SyncProbe
from nemo_rl.algorithms.rollout.validation import Validator
from nemo_rl.algorithms.runtime.run_folders import RunFolders
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.workers import (
    PolicyStart,
    Workers,
    make_probe,
    make_refitter,
    start_environments,
    start_workers,
)
from nemo_rl.config import RolloutMasterConfig, TeacherConfig
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.loader import build_loader
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.prompt_stream import PromptStream
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.models.generation.factory import check_engine_model, sampling_params
from nemo_rl.utils.logger import Logger, print_message_log_samples


@dataclass(frozen=True)
class RolloutPlan:
    """What an algorithm has settled before anything starts.

    Attributes:
        tokenizer: of policy, engines and data.
        data: prompts.
        folders: logs and checkpoints.
        needs_reference: keep the policy's initial weights.
        prompt_factor: prompts drawn at a time over `num_prompts_per_step`.
        teacher: a frozen second model, inference only; None for none.
        started_at: `time.perf_counter()` at process start.
    """

    tokenizer: PreTrainedTokenizerBase
    data: RunData
    folders: RunFolders
    needs_reference: bool = False
    prompt_factor: float = 1.0
    teacher: TeacherConfig | None = None
    started_at: float = 0.0


@dataclass(frozen=True)
class RolloutParts:
    """What a run that samples is made of, whatever it learns from the samples.

    Attributes:
        session: steps, metrics, validation, checkpoints.
        refitter: keeps engines at the policy's weights.
        probe: proves that the engines sample from the policy.
        source: rollouts of a step.
        workers: policy, engines, environments, and the teacher if there is one.
        trajectory_log: JSONL of everything that was said.
        closers: to be called in order when the run is over.
    """

    session: Session
    refitter: Refitter
    probe: SyncProbe
    source: FreshRollouts
    workers: Workers
    trajectory_log: TrajectoryLog
    closers: tuple[Callable[[], Any], ...]


def start_rollouts(config: RolloutMasterConfig, plan: RolloutPlan) -> RolloutParts:
    """Start Ray and all workers, and connect them.

    Raises:
        ConfigError, DataError: a tracker cannot report, or the data has no batch; before Ray starts.
        ResourceInsufficientError: the cluster lacks what is asked for.
    """
    check_engine_model(config.policy, config.cluster)
    prompts = make_prompts(config, plan)
    backends = Logger(config.logger, plan.folders.log_dir, config.algorithm.max_num_steps)
    backends.log_hyperparams(config.model_dump())
    with ExitStack() as undo:
        undo.callback(backends.close)
        parts = _connect(config, plan, prompts, backends)
        undo.pop_all()
    return parts


def _connect(config: RolloutMasterConfig, plan: RolloutPlan, prompts: PromptStream, backends: Logger) -> RolloutParts:
    """Everything behind the start of Ray."""
    folders, tokenizer, algorithm = plan.folders, plan.tokenizer, config.algorithm
    init_ray(str(folders.log_dir))
    environments = start_environments(plan.data.task_env.values(), config.env, config.cluster)
    start = PolicyStart(algorithm.seed, folders.resume_path, plan.needs_reference, plan.teacher)
    workers = start_workers(config.policy, config.cluster, tokenizer, start, environments)
    loop = EventLoopThread()
    limits = RolloutLimits(
        config.policy.max_total_sequence_length, algorithm.max_rollout_turns, config.cluster.timeouts.rollout_s
    )
    runner = RolloutRunner(workers.generation, environments, tokenizer, limits, loop)
    refitter = make_refitter(config.policy, config.cluster, workers)
    trajectory_log = TrajectoryLog(folders.log_dir, config.logger.save_trajectories)
    parts = SessionParts(
        cadence=_cadence(config),
        logger=backends,
        checkpoints=folders.checkpoints,
        policy=workers.policy,
        data=prompts,
        validate=make_validation(config, plan, runner, refitter, trajectory_log),
        run_config=config,
        save_optimizer=config.checkpointing.save_optimizer,
        save_consolidated=config.checkpointing.save_consolidated,
        must_save_by=config.checkpointing.checkpoint_must_save_by,
        signal_grace_s=config.checkpointing.signal_grace_s,
    )
    return RolloutParts(
        session=Session(parts, folders.resume_path, plan.started_at),
        refitter=refitter,
        probe=make_probe(config.policy, config.cluster, workers, refitter),
        source=_source(config, plan, prompts, runner),
        workers=workers,
        trajectory_log=trajectory_log,
        closers=(backends.close, loop.close, workers.close),
    )


def make_prompts(config: RolloutMasterConfig, plan: RolloutPlan) -> PromptStream:
    """The training prompts, epoch after epoch."""
    algorithm = config.algorithm
    loader = build_loader(
        plan.data.train,
        int(algorithm.num_prompts_per_step * plan.prompt_factor),
        shuffle=config.data.shuffle,
        seed=algorithm.seed,
        num_workers=config.data.num_workers,
        accept_changes=bool(config.checkpointing.allow_changed),
        max_bad_row_share=config.data.max_bad_row_share,
    )
    return PromptStream(loader, algorithm.max_num_epochs)


def _source(
    config: RolloutMasterConfig, plan: RolloutPlan, prompts: PromptStream, runner: RolloutRunner
) -> FreshRollouts:
    return FreshRollouts(
        prompts.next_batch,
        runner,
        sampling_params(config.policy, plan.tokenizer.eos_token_id, validation=False),
        config.algorithm.num_generations_per_prompt,
        config.algorithm.seed,
    )


def make_validation(
    config: RolloutMasterConfig,
    plan: RolloutPlan,
    runner: RolloutRunner,
    refitter: Refitter,
    trajectory_log: TrajectoryLog,
) -> Callable[[int], dict[str, float]] | None:
    """A function that validates after a step, or None without validation data."""
    data = plan.data.validation
    if data is None:
        return None
    algorithm = config.algorithm
    num_rows = min(len(data), algorithm.max_val_samples or len(data))
    batch_size = min(algorithm.val_batch_size or num_rows, num_rows)
    loader = build_loader(data, batch_size, shuffle=False, seed=algorithm.seed, drop_last=False, max_rows=num_rows)
    validator = Validator(
        loader,
        runner,
        sampling_params(config.policy, plan.tokenizer.eos_token_id, validation=True),
        algorithm.val_num_generations_per_prompt,
        algorithm.seed,
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
