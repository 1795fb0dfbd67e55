"""Define the parts of a run, and the training loop that all algorithms share.

    source.next_batch ─► each stage adds to the batch ─► policy.train ─► metrics, checkpoint

    train_with_restarts ─► train ─► a failure ─► Run.recover: raises it, or makes the run ready for train

An algorithm is a choice of these parts: the source of batches (rollouts or written data), the stages before the update
(log-probabilities, scores of a second model, advantages), and the loss. Invariant: the loop itself has no options.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from torch import Tensor

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.data.streams.prompt_stream import GroupRewards, PromptPosition
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.interfaces import PolicyInterface, TrainResult

type Phase = Callable[[str], AbstractContextManager[None]]
"""Function that measures the time of a part of the step, such as `Session.phase`."""


@dataclass
class StepBatch:
    """The batch of one step."""

    tensors: BatchedDataDict[Any]
    """Tensors of the B rows. Stages add columns."""
    trajectories: Sequence[Trajectory] = ()
    """Rollouts of the rows, in order. A rollout with branches has several rows. Empty for written data."""
    num_prompts: int = 0
    """Number of prompts, or of samples of written data, that the batch uses."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of how the batch was made, logged under `train/`."""
    metrics_under: dict[str, dict[str, float]] = field(default_factory=dict)
    """Other metrics, by the prefix under which they are logged."""
    rows_per_update: int | Sequence[int] | None = None
    """Number of rows of each optimizer update, or a list of them. If None, `policy.train_global_batch_size`."""
    prompts: Sequence[PromptPosition] = ()
    """Positions in the data to acknowledge after the training on the batch."""
    rewards: GroupRewards = field(default_factory=dict)
    """Rewards of the samples of each prompt in `prompts`, including samples that are not in the batch."""
    num_stale_B: Tensor | None = None
    """`[B]` int64, position after the last token that outdated weights wrote. None if no token is stale."""
    unmeasured: frozenset[str] = frozenset()
    """Metrics of the update that are not valid for this batch, and are not logged."""

    def measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the given metrics except those in `unmeasured`."""
        return {name: value for name, value in metrics.items() if name not in self.unmeasured}

    @property
    def rows(self) -> list[Trajectory]:
        """Return the conversation of each of the B rows (`experience.rows.rows_of`)."""
        return rows_of(self.trajectories)


class BatchSource(Protocol):
    """Interface of a source that returns the batch of each step."""

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """Return the batch of step `step`, counted from 1.

        Raises:
            DataExhausted: there is no further batch.
        """

    def trained(self, step: int, batch: StepBatch) -> None:
        """Acknowledge the prompts of a trained batch, so that checkpoints count them as used."""


class Stage(Protocol):
    """Step of the loop that changes the batch before the update."""

    @property
    def name(self) -> str:
        """Return the name under which the stage's time is logged, `timing/train/<name>`."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the models that the stage uses, which get shared devices. If it is empty, devices are not moved."""

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Add columns to `batch.tensors`, and return metrics of the step."""


class Trainer(Protocol):
    """Interface that makes the update of a step: the policy, or an object that calls the policy."""

    def train(
        self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | Sequence[int] | None = None
    ) -> TrainResult:
        """Make one optimizer update per global batch of `gbs` rows, as `PolicyInterface.train`."""


def cannot_recover(run: "Run", failure: Exception) -> None:
    """Raise the failure. Used by a run that does not restart itself."""
    raise failure


@dataclass
class Run:
    """All parts of one run, as `setup` of an algorithm returns them. As a context manager, it closes the run."""

    session: Session
    """Session that counts steps, logs, validates and saves checkpoints."""
    source: BatchSource
    """Source of the batches."""
    stages: list[Stage]
    """Stages that change the batch before the update, in order."""
    roles: Mapping[str, PolicyInterface]
    """Models by name. `loss_fn` trains "policy"."""
    loss_fn: AnyLossFunction
    """Loss of the policy."""
    memory: MemorySharing
    """Decides which models have their state on shared devices."""
    resources: ExitStack
    """Stack of everything that was started, which is closed in reverse order."""
    generation: GenerationInterface | None = None
    """The engines. None if the run does not sample."""
    trainer: Trainer | None = None
    """Object that makes the updates. If None, the policy."""
    recover: Callable[["Run", Exception], None] = cannot_recover
    """Function that is called with the run and the failure that ended `train`. It raises the failure, or prepares the
    run for further training (`runtime.recovery`)."""

    @property
    def policy(self) -> PolicyInterface:
        """The model that `loss_fn` trains."""
        return self.roles["policy"]

    def close(self) -> None:
        """Stop all workers and release their resources, even if a part fails to stop."""
        self.__exit__(*sys.exc_info())

    def __iter__(self) -> NoReturn:
        """Raise an error, because programs written for NeMo RL unpack the result of `setup`."""
        raise TypeError(
            "setup returns one Run, not a tuple: `run = setup(...)`, then `grpo_train(run)` or the function of another "
            "algorithm, and run.close()."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resources.__exit__(kind, error, trace)  # the record of the run's end gets the error


def train_with_restarts(run: Run) -> None:
    """Train as `train` does. If ranks of a model die or hang, replace them and train again.

    Args:
        run: The parts of the run.

    Raises:
        RunRestartError: There were too many failures, or a step failed twice in the same way.
        Exception: The failure had another cause than lost ranks.
    """
    while True:
        try:
            train(run)
            return
        except Exception as failure:  # boundary: a lost rank may show as any error of the ranks that wait for it
            run.recover(run, failure)


def train(run: Run) -> None:
    """Train until the steps, the data or the time run out.

    Args:
        run: the parts of the run.
    """
    session, trainer = run.session, run.trainer or run.policy
    with session:
        for step in session.steps():
            batch = run.source.next_batch(step, session.phase)
            for stage in run.stages:
                run.memory.hand_to(stage.roles)
                with session.phase(stage.name):
                    session.record(stage.apply(batch))
            run.memory.hand_to(("policy",))
            with session.phase("policy_training"):
                result = trainer.train(batch.tensors, run.loss_fn, gbs=batch.rows_per_update)
            session.record(batch.measured(result["metrics"]), batch.metrics)
            for prefix, metrics in batch.metrics_under.items():
                session.record_under(prefix, metrics)
            run.source.trained(step, batch)
            session.finish_step(step, batch.num_prompts)
