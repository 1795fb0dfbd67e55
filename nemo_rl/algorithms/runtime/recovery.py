"""Replace ranks of a run's models that died or hang, and continue the run from its newest checkpoint.

    train ─► failure ─► models with lost ranks ─► new ranks in the same places ─► new parts in the controller ─► train
                        none: the failure ends      load the newest checkpoint     session and source begin at the
                        the run                     or the initial weights         step of that checkpoint

Engines, environments, trackers and the lock of the checkpoint folder are kept. The parts in the controller are built
again, not reset. Invariant: after a restart a run computes the same numbers as a run that is started again from the
same checkpoint, and its files and trackers hold each step once.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.run import BatchSource, Run, Stage, Trainer
from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.utils.errors import DeadlineExceededError, RayDiedError, RunRestartError
from nemo_rl.utils.logger import Logger

logger = logging.getLogger(__name__)

_CHANGES_WITH_EACH_PROCESS = re.compile(r"pid \d+|\bid [0-9a-f]{8,}")


class Replaceable(Protocol):
    """Interface of a model whose ranks can be replaced."""

    def find_loss(self, *, silence_is_loss: bool) -> str | None:
        """Return a one-line reason to replace the ranks, or None if they need not be replaced."""


class BuiltSource(BatchSource, Protocol):
    """A source that the `setup` of an algorithm has built."""

    @property
    def was_changed(self) -> bool:
        """True if the program has replaced a part of the source."""


@dataclass(frozen=True)
class Connection:
    """The parts of a run in the controller that are connected to its workers. The fields are those of `Run`."""

    session: Session
    source: BuiltSource
    stages: list[Stage]
    memory: MemorySharing
    trainer: Trainer | None = None


class Restartable(Protocol):
    """Interface to replace ranks of a run and to connect the run to its workers again."""

    @property
    def models(self) -> Mapping[str, Replaceable]:
        """All models by name."""

    def newest_checkpoint(self) -> Path | None:
        """Return the step folder to continue from, or None to begin again at step 1."""

    def replace_ranks(self, lost: Collection[str], resume_path: Path | None) -> None:
        """End the threads of the controller's parts, and replace the ranks of trained models and of `lost` models."""

    def rebuild(self, resume_path: Path | None) -> Connection:
        """Build the parts in the controller again, for a run that continues from a step folder."""


@dataclass(frozen=True)
class Cause:
    """The reason of a restart."""

    step: int
    """The step that failed."""
    reason: str
    """The failure, in one line."""

    @property
    def kind(self) -> tuple[int, str]:
        """Return the cause without process ids and similar values, so that equal failures have equal texts."""
        return self.step, _CHANGES_WITH_EACH_PROCESS.sub("", self.reason)

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


@dataclass
class Recovery:
    """Callable that prepares a run for further training after a failure (`Run.recover`)."""

    max_restarts: int
    """Number of restarts that are allowed. The next failure ends the run."""
    workers: Restartable
    """Object that restarts workers and builds the parts in the controller."""
    metrics: Logger
    connection: Connection
    """The current parts in the controller."""
    causes: list[Cause] = field(default_factory=list)
    """Causes of the restarts so far."""

    def __call__(self, run: Run, failure: Exception) -> None:
        """Replace lost ranks, and build the run's source and session again.

        Raises:
            RunRestartError: The allowed restarts are used up, the same step failed twice in the same way, or the
                program has replaced a part of the run that cannot be built again.
            Exception: The given failure, if no rank is lost, the run must stop or its Ray has ended.
        """
        if not self.max_restarts or run.session.must_stop or isinstance(failure, RayDiedError):
            raise failure
        silence_is_loss = isinstance(failure, DeadlineExceededError)
        losses = {name: model.find_loss(silence_is_loss=silence_is_loss) for name, model in self.workers.models.items()}
        lost = {name: loss for name, loss in losses.items() if loss is not None}
        if not lost:
            raise failure
        logger.warning("%s", failure)
        self._note(Cause(run.session.step, _reason(failure, lost)), failure)
        if run.source is not self.connection.source or self.connection.source.was_changed:
            raise RunRestartError(
                f"The models {sorted(lost)} lost ranks, and the run cannot restart by itself, because its source was "
                "replaced after setup. Name the source in the key rollout_source of the algorithm's section, or start "
                f"the same command again. {self.causes[-1]}"
            ) from failure
        self._restart(run, lost)

    def _note(self, cause: Cause, failure: Exception) -> None:
        """Record a cause. Raise an error if there are too many causes or if this one is repeated."""
        repeats = cause.kind in [earlier.kind for earlier in self.causes]
        self.causes.append(cause)
        if not repeats and len(self.causes) <= self.max_restarts:
            return
        limit = f"cluster.max_run_restarts={self.max_restarts} restarts are used up"
        why = f"Step {cause.step} failed twice in the same way" if repeats else limit
        listed = "\n".join(f"  {each}" for each in self.causes)
        raise RunRestartError(f"{why}, so the run ends. The causes:\n{listed}") from failure

    def _restart(self, run: Run, lost: Mapping[str, str]) -> None:
        failed, last, checkpoint = self.causes[-1], run.session.state.total_steps, self.workers.newest_checkpoint()
        logger.warning(
            "Restart %d of %d: the ranks of %s are replaced and continue from %s; engines and environments stay. %s",
            *(len(self.causes), self.max_restarts, ", ".join(lost), checkpoint or "the initial weights", failed),
        )
        self.workers.replace_ranks(lost.keys(), checkpoint)
        self.metrics.go_back()
        self.connection = self.workers.rebuild(checkpoint)
        self.connection.session.take_over(run.session, len(self.causes))
        run.session, run.source = self.connection.session, self.connection.source
        run.stages, run.memory, run.trainer = (
            self.connection.stages,
            self.connection.memory,
            self.connection.trainer,
        )
        first = run.session.state.total_steps + 1
        if first <= last:
            logger.warning("Steps %d to %d are trained again; files and trackers log each once.", first, last)


def _reason(failure: Exception, lost: Mapping[str, str]) -> str:
    """Return the failure's type and first line, and those reasons of lost ranks that the line lacks."""
    message = str(failure).partition("\n")[0]
    others = [f"({name}: {loss})" for name, loss in lost.items() if loss != message]
    return " ".join([f"{type(failure).__name__}: {message}", *others])
