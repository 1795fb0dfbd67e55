"""On-policy distillation: the loop, and re-exports of everything it is made of.

One step: fresh weights to the engines, the student answers, the teacher says how it would have gone on after every
token of the answers, the student moves towards that. The direction of the divergence and the treatment of rare tokens
are values of the loss (`losses.distillation`). Invariant: the loop holds no option, and the teacher never changes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.rollout_source import RolloutSource
from nemo_rl.algorithms.rollout.sync_probe import SyncProbe
from nemo_rl.algorithms.rollout.teacher import Teacher, check_vocab_equality
from nemo_rl.algorithms.rollout.training_batch import build_training_batch
from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.config import DistillationConfig
from nemo_rl.config import DistillationMasterConfig as MasterConfig
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.distillation import DistillationLossFn
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.utils.closing import close_all

__all__ = ["DistillationConfig", "DistillationRun", "MasterConfig", "check_vocab_equality", "distillation_train"]

logger = logging.getLogger(__name__)


@dataclass
class DistillationRun:
    """Everything one distillation run is made of; built by `assemble_distillation.assemble_distillation`.

    Attributes:
        session: steps, metrics, validation, checkpoints.
        refitter: keeps engines at the student's weights.
        probe: proves that the engines sample from the student.
        source: the student's answers of a step.
        teacher: the model that is learned from.
        policy: the student.
        loss_fn: divergence between the two.
        trajectory_log: JSONL of everything that was said.
        pad_token_id: pads batches.
        mask_truncated: leave answers that hit the length limit out of the loss.
        closers: called in order when the run is over.
    """

    session: Session
    refitter: Refitter
    probe: SyncProbe
    source: RolloutSource
    teacher: Teacher
    policy: PolicyInterface
    loss_fn: DistillationLossFn
    trajectory_log: TrajectoryLog
    pad_token_id: int
    mask_truncated: bool
    closers: Sequence[Any] = ()

    def close(self) -> None:
        """Stop all workers and free what they hold."""
        close_all(self.closers)


def distillation_train(run: DistillationRun) -> None:
    """Train until the steps, the data or the clock run out.

    Args:
        run: the parts of the run.
    """
    session = run.session
    with session:
        for step in session.steps():
            with session.phase("weight_sync"):
                run.refitter.ensure_fresh()
            with session.phase("generation"):
                rollouts = run.source.collect(step)
            run.refitter.before_training()
            trajectories = rollouts.trajectories
            batch = build_training_batch(
                trajectories, run.pad_token_id, mask_truncated=run.mask_truncated, needs_reward=False
            )
            run.probe.check(batch)
            with session.phase("teacher_logprob_inference"):
                run.teacher.add_topk_logits(batch)
            with session.phase("policy_training"):
                result = run.policy.train(batch, run.loss_fn)
            session.record(result["metrics"], rollout_metrics(trajectories), rollouts.metrics)
            session.record_under("refit", run.refitter.last_sync)
            run.trajectory_log.write_training(step, trajectories, batch)
            session.finish_step(step, num_prompts=len({t.group_index for t in trajectories}))
