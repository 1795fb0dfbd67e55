"""Group relative policy optimisation: the loop, and re-exports of everything it is made of.

One step: fresh weights to the engines, rollouts, batch, log-probabilities, advantages, update. Every variant (DAPO,
GSPO, Dr.GRPO, RLOO, REINFORCE++, CISPO ...) is a value that `assemble` chose: a rollout source, an advantage estimator,
a loss. Invariant: the loop holds no option.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.credit.assignment import CreditAssignment
from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.rollout_source import RolloutSource
from nemo_rl.algorithms.rollout.scoring import PolicyScoring
from nemo_rl.algorithms.rollout.sync_probe import SyncProbe
from nemo_rl.algorithms.rollout.training_batch import build_training_batch
from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.config import GRPOConfig
from nemo_rl.config import GRPOMasterConfig as MasterConfig
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.interfaces import LossFunction
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.utils.closing import close_all

__all__ = ["GRPOConfig", "GRPORun", "MasterConfig", "grpo_train"]

logger = logging.getLogger(__name__)


@dataclass
class GRPORun:
    """Everything one GRPO run is made of; built by `assemble.assemble_grpo`.

    Attributes:
        session: steps, metrics, validation, checkpoints.
        refitter: keeps engines at the policy's weights.
        probe: proves that the engines sample from the policy.
        source: rollouts of a step.
        scoring: log-probabilities under the current and the reference policy.
        credit: rewards to advantages.
        policy: the model under training.
        loss_fn: what it is trained on.
        trajectory_log: JSONL of everything that was said.
        pad_token_id: pads batches.
        mask_truncated: overlong filtering.
        closers: called in order when the run is over.
    """

    session: Session
    refitter: Refitter
    probe: SyncProbe
    source: RolloutSource
    scoring: PolicyScoring
    credit: CreditAssignment
    policy: PolicyInterface
    loss_fn: LossFunction
    trajectory_log: TrajectoryLog
    pad_token_id: int
    mask_truncated: bool
    closers: Sequence[Any] = ()

    def close(self) -> None:
        """Stop all workers and free what they hold."""
        close_all(self.closers)


def grpo_train(run: GRPORun) -> None:
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
            batch = build_training_batch(trajectories, run.pad_token_id, mask_truncated=run.mask_truncated)
            run.probe.check(batch)
            with session.phase("policy_and_reference_logprobs"):
                scores = run.scoring.add_logprobs(batch)
            with session.phase("advantage_calculation"):
                credit = run.credit.assign(batch, trajectories)
            with session.phase("policy_training"):
                result = run.policy.train(batch, run.loss_fn)
            session.record(result["metrics"], scores, credit)
            session.record(rollout_metrics(trajectories), rollouts.metrics)
            session.record_under("refit", run.refitter.last_sync)
            run.trajectory_log.write_training(step, trajectories, batch)
            session.finish_step(step, num_prompts=len({t.group_index for t in trajectories}))
