"""Count steps, log metrics, validate, save checkpoints and end a run, around the training loop.

The loop iterates over `session.steps()` and calls `record` and `finish_step`. A `Session` owns the save state.
Invariants: a checkpoint holds everything that the next step depends on, so a run that was killed and started again logs
the same metrics as one that never stopped. A run that ends with fewer steps than configured logs why. After a signal,
the run finishes the current step, saves a checkpoint and ends.

A validation may run while training continues (`runtime.validations`). The session waits for its result before the next
validation, before the checkpoint of a later step, at the end of the run, and at once if `stop_metric` is set. The
checkpoint of the validated step is written without waiting, and gets the metrics later. If the run is killed in
between, the resumed run validates again. Each validation is therefore logged once.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import BaseModel

from nemo_rl.algorithms.runtime.idle_steps import IdleSteps, made_update
from nemo_rl.algorithms.runtime.resume_check import DATA_POSITION_FILE
from nemo_rl.algorithms.runtime.saving import CheckpointSaver, Savable
from nemo_rl.algorithms.runtime.throughput import Throughput
from nemo_rl.algorithms.runtime.validations import Validation, Validations
from nemo_rl.config import CheckpointingConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted
from nemo_rl.files.safe_load import load_plain
from nemo_rl.host.stop_signals import DeferredSignals
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError, NemoRLError, NothingToLearnError, RunInterruptedError
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)

_CONTINUES = "%s Training continues; the next save, or the one at the end, is another attempt."


@dataclass
class SaveState:
    """The counters of a run that are stored in `training_info.json`."""

    total_steps: int = 0
    """Number of finished training steps."""
    current_step: int = 0
    current_epoch: int = 0
    consumed_samples: int = 0
    """Number of prompts drawn."""
    total_valid_tokens: int = 0
    """Number of tokens that counted in a loss."""
    trained_steps: int = 0
    """Finished steps that made an update."""
    val_reward: float = -99999999.0
    """Main metric of the last validation."""
    validating_step: int = 0
    """Step whose validation was running when the state was saved. 0 if none was running."""


@dataclass(frozen=True)
class Cadence:
    """The steps at which a session validates and saves, and the conditions to stop."""

    max_num_steps: int
    """Number of the last step."""
    val_period: int = 0
    """Number of steps between two validations. If 0, there is no periodic validation."""
    val_start_at: int = -1
    """First step of periodic validation. If -1, it is not delayed."""
    val_at_start: bool = False
    """Whether to validate before step 1."""
    val_at_end: bool = False
    """Whether to validate after the last step."""
    save_period: int = 10
    """Number of steps between two checkpoints."""
    stop_metric: str | None = None
    """Validation metric that may end the run."""
    stop_threshold: float | None = None
    """Value of the metric at which the run ends."""
    max_idle_steps: int = 5
    """Number of consecutive steps without an update that end the run with an error."""


class Resumable(Protocol):
    """Interface of a source of training data whose position can be stored."""

    @property
    def epoch(self) -> int:
        """Return the number of finished passes over the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a stored position."""


@dataclass
class SessionParts:
    """Parts that a session uses."""

    cadence: Cadence
    """Steps at which the session validates and saves, and conditions to stop."""
    logger: Logger
    """Logger that sends metrics to all backends."""
    checkpointing: CheckpointingConfig
    checkpoints: CheckpointManager | None
    """Manager of the checkpoint folder. None if checkpointing is off."""
    models: Mapping[str, Savable]
    """Models to save, each into the folder of its name."""
    source: Resumable
    """The training data, whose position is saved."""
    validation: Validation | None
    """Validation of the policy. None without validation data."""
    run_config: BaseModel
    """Configuration that every checkpoint stores."""
    throughput: Throughput
    """Object that measures tokens and operations per second."""
    timer: Timer = field(default_factory=Timer)


class Session:
    """The steps, validations and checkpoints of one run.

    Args:
        parts: The parts that the session connects.
        resume_path: Checkpoint folder from which to resume. If None, a new run starts.
        started_at: Value of `time.perf_counter()` at process start, for the time to the first step.
    """

    def __init__(self, parts: SessionParts, resume_path: Path | None, started_at: float):
        self._parts = parts
        self._cadence = parts.cadence
        self.timer = parts.timer
        """Phases of the current step."""
        self.state = SaveState()
        """The counters that checkpoints store."""
        self.step = 0
        """The current or last step. It is 0 before the first step."""
        self.num_restarts = 0
        """Number of times that the run has replaced the ranks of its models."""
        must_save_by = parts.checkpointing.checkpoint_must_save_by
        self._deadline = TimeoutChecker(must_save_by, fit_last_save_time=True) if must_save_by else None
        self._started_at = started_at
        self._step_started = 0.0
        self._metrics: dict[str, float] = {}
        self._extra: dict[str, dict[str, float]] = {}
        self._finished: dict[str, float] = {}
        saves = parts.checkpointing if parts.checkpoints is not None else None
        self._validations = Validations(
            parts.validation, parts.logger, saves, parts.cadence.stop_metric, parts.cadence.stop_threshold
        )
        self._idle = IdleSteps(parts.cadence.max_idle_steps)
        self._saver: CheckpointSaver | None = None
        if parts.checkpoints is not None:
            self._saver = CheckpointSaver(parts.checkpoints, parts.checkpointing, parts.models, parts.run_config)
        self._resumed_step: int | None = None
        self._position: dict[str, Any] | None = None
        self._stop_reason: str | None = None
        self._interrupted = False
        self._out_of_time = False
        self._signals = DeferredSignals(
            parts.checkpointing.signal_grace_s, "the run ends after this step with a checkpoint"
        )
        if resume_path is not None:
            self._resume(resume_path)

    def _resume(self, path: Path) -> None:
        assert self._parts.checkpoints is not None and self._saver is not None
        info = self._parts.checkpoints.load_training_info(path) or {}
        known = {name: info[name] for name in asdict(self.state) if name in info}
        self.state = SaveState(**({"trained_steps": info.get("total_steps", 0)} | known))
        self._saver.saved_step = self.state.total_steps
        self._resumed_step = self.state.total_steps
        self._position = load_plain(path / DATA_POSITION_FILE)
        logger.info("Resuming from %s after step %d.", path, self.state.total_steps)

    @property
    def must_stop(self) -> bool:
        """Return True if a signal was received, after which the run must end."""
        return self._signals.received is not None

    def take_over(self, earlier: "Session", num_restarts: int) -> None:
        """Take over the time limit of `earlier`, the session that this session replaces after a restart."""
        self._deadline = earlier._deadline
        self.num_restarts = num_restarts

    def __enter__(self) -> Self:
        """Begin the run. Move the source, possibly replaced after `setup`, to the checkpoint's position."""
        if self._position is not None:
            self._parts.source.load_state_dict(self._position)
            self._position = None
        is_missing = 0 < self.state.validating_step == self.state.total_steps
        if is_missing or (self._cadence.val_at_start and self.state.total_steps == 0):
            self._validate(self.state.total_steps)
        if self._parts.checkpoints is not None:
            self._signals.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the run, and log the reason. The end of the data is not an error.

        Raises:
            RunInterruptedError: A signal ended the run before its last step.
            NothingToLearnError: No step made an update.
        """
        try:
            if isinstance(error, DataExhausted):
                self._validate_last_step()
                self._stop_reason = str(error)
            elif error is not None:
                self._save_what_is_left(error)
                return False
            self._end()
        finally:
            self._signals.stop()
        return True

    def validate_alone(self) -> None:
        """Validate the policy's current weights without training, and log the metrics."""
        self._validate(self.state.total_steps)
        self._note_validation(wait=True)

    def _validate_last_step(self) -> None:
        """Validate for `val_at_end` if the data ended early, so that the last step was not known to be the last."""
        step = self.state.total_steps
        if self._cadence.val_at_end and self._finished and self._validations.started_step != step:
            self._validate(step)
            self._note_validation(wait=True)
            # # The checkpoint of this step was saved without the validation's metrics.
            if self._saver is not None:
                self._settle_or_continue()
                self._saver.saved_step = min(self._saver.saved_step, step - 1)

    def _save_what_is_left(self, error: BaseException) -> None:
        """Complete a checkpoint that is being written, if the models can still answer after the error."""
        if self._saver is not None and isinstance(error, Exception):
            try:
                self._saver.settle()
            except NemoRLError as failure:
                logger.error("%s", failure)

    def _end(self) -> None:
        step, last_step = self.state.total_steps, self._cadence.max_num_steps
        if not self._ends_early:
            self._finish_validation()
        if step == self._resumed_step and not self._interrupted:
            logger.warning(
                "Nothing was trained: %s. Raise max_num_steps or max_num_epochs, or start a new run in another "
                "checkpointing.checkpoint_dir.",
                self._stop_reason
                or f"the checkpoint is at step {step} already, and the run ends at step {self._cadence.max_num_steps}",
            )
            return
        self._settle_or_continue()
        if self._saver is not None and step > self._saver.saved_step:
            self._checkpoint(step)
            self._saver.settle()
        self._finish_validation()
        if step and not self.state.trained_steps and not self._interrupted:
            raise NothingToLearnError(
                f"None of the {step} steps made an update, so nothing was learned; the warnings above say why."
            )
        if step >= last_step:
            self._signals.all_is_saved(0)  # the run is complete, even if a signal ends it while it closes
            logger.info("Finished %d steps.", step)
            return
        reason = self._stop_reason or "no reason was recorded"
        logger.warning("Stopped after step %d of %d: %s.", step, last_step, reason)
        if self._interrupted:
            if step == 0:
                self._signals.act_at_once()
            self._signals.all_is_saved(RunInterruptedError.exit_status)
            saved = f"The checkpoint of step {step} is complete" if step else "No step was finished"
            raise RunInterruptedError(f"{reason}. {saved}; the same command resumes the run.")

    def steps(self) -> Iterator[int]:
        """Yield step numbers, from 1 or from the step after the checkpoint, until the run must stop."""
        if self._deadline is not None:
            self._deadline.start_iterations()
        while self.state.total_steps < self._cadence.max_num_steps and not self._has_to_stop():
            self.timer.reset()
            self._parts.throughput.begin_step()
            self._step_started = time.perf_counter()
            self._metrics, self._extra = {}, {}
            self.step = self.state.total_steps + 1
            yield self.step

    def _has_to_stop(self) -> bool:
        if self._stop_reason is None and self._signals.received is not None:
            self._interrupted = True
            self._stop_reason = f"{self._signals.received.name} was received"
        return self._stop_reason is not None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a part of the step, logged as `timing/train/<name>`."""
        with self.timer.time(name):
            yield

    def record(self, *groups: Mapping[str, float]) -> None:
        """Record metrics of the step. `finish_step` logs them under `train/`."""
        for group in groups:
            self._metrics.update(group)

    def record_under(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Record metrics of the step that are logged under another prefix."""
        self._extra[prefix] = dict(metrics)

    def finish_step(self, step: int, num_prompts: int) -> None:
        """Count the step, validate and save if they are due, log, and decide whether to continue.

        Raises:
            NothingToLearnError, NonFiniteError: Too many steps in a row made no update. The state before them is saved.
        """
        self._settle_or_continue(wait=False)
        self.state.total_steps = step
        self.state.current_step = step
        self.state.current_epoch = self._parts.source.epoch
        self.state.consumed_samples += num_prompts
        self.state.total_valid_tokens += int(self._metrics.get("global_valid_toks", 0))
        self.state.trained_steps += made_update(self._metrics)
        self._finished = {f"train:{name}": value for name, value in self._metrics.items()}
        train_seconds = time.perf_counter() - self._step_started
        # # The throughput is measured before a validation, whose passes are not part of the step.
        performance = self._parts.throughput.of_step(self._metrics, self._timings(train_seconds))
        self._note_validation(wait=False)
        if self._validation_is_due(step):
            self._validate(step)
        self._check_deadline()
        if step % self._cadence.save_period == 0 or self._stop_reason is not None:
            with self.timer.time("checkpointing"):
                self._checkpoint_or_continue(step)
        self._log(step, train_seconds, performance)
        error = self._idle.note(step, self._metrics)
        if error is not None:
            if self._saver is not None and step - self._idle.in_a_row > self._saver.saved_step:
                try:
                    self._checkpoint(step)
                except CheckpointError as failure:
                    error.add_note(str(failure))
            raise error

    def _validation_is_due(self, step: int) -> bool:
        cadence = self._cadence
        is_last = step == cadence.max_num_steps
        periodic = cadence.val_period > 0 and step % cadence.val_period == 0
        return (periodic and step >= cadence.val_start_at) or (is_last and cadence.val_at_end)

    def _validate(self, step: int) -> None:
        """Finish the previous validation, then start a new one. Wait for its result only if it may end the run."""
        self._note_validation(wait=True)
        self._validations.start(step)
        self._note_validation(wait=self._cadence.stop_metric is not None)

    def _note_validation(self, *, wait: bool) -> None:
        """Log the metrics of a finished validation, add them to its checkpoint, and stop if they require it."""
        result = self._validations.log_finished(wait=wait)
        if result is None:
            return
        self.state.val_reward = result.metrics.get("accuracy", self.state.val_reward)
        if result.step == self.state.total_steps:
            self._finished |= result.saved
        if self._saver is not None:
            try:
                late = {"val_reward": self.state.val_reward, "validating_step": 0}
                self._saver.add_to_info(result.step, result.saved | late)
            except CheckpointError as error:
                logger.error("The checkpoint of step %d is complete without its validation: %s", result.step, error)
        self._stop_reason = self._validations.stop_reason(result.metrics) or self._stop_reason

    @property
    def _ends_early(self) -> bool:
        """Return True if a signal or the time limit ends the run, which then does not wait for a validation."""
        return self._interrupted or self._out_of_time or self.must_stop

    def _settle_earlier_validation(self, step: int) -> None:
        """Finish the validation of an earlier step before the checkpoint of this step is saved.

        A run that resumes from this step's checkpoint lacks the weights of that validation, so it cannot repeat it.
        """
        if self._validations.running_step not in (None, step):
            self._finish_validation()

    def _finish_validation(self) -> None:
        """Wait for the running validation, or cancel it if the run has to end early."""
        running = self._validations.running_step
        if running is None or not self._ends_early:
            self._note_validation(wait=True)
            return
        repeats = self.state.validating_step == running == self.state.total_steps
        logger.warning(
            "The validation after step %d is given up, because the run has to end.%s",
            *(running, " The same command repeats it." if repeats else ""),
        )
        self._validations.cancel()

    def _check_deadline(self) -> None:
        if self._deadline is None:
            return
        self._deadline.mark_iteration()
        if self._deadline.check_save():
            self._out_of_time = True
            self._stop_reason = (
                f"checkpointing.checkpoint_must_save_by={self._parts.checkpointing.checkpoint_must_save_by} is due"
            )

    def _checkpoint_or_continue(self, step: int) -> None:
        """Save a checkpoint. If this fails, the run continues, because its newest weights exist only in memory."""
        try:
            self._checkpoint(step)
        except CheckpointError as error:
            logger.error(_CONTINUES, error)

    def _settle_or_continue(self, *, wait: bool = True) -> None:
        """Complete a checkpoint that is written in the background. If this fails, the run continues."""
        if self._saver is not None:
            try:
                self._saver.settle(wait=wait)
            except CheckpointError as error:
                logger.error(_CONTINUES, error)

    def _checkpoint(self, step: int) -> None:
        """Save a checkpoint of the step, if checkpointing is on."""
        if self._saver is not None:
            self._settle_earlier_validation(step)
            self.state.validating_step = self._validations.running_step or 0
            self._settle_or_continue()
            self._saver.save(step, asdict(self.state) | self._finished, self._parts.source.state_dict())

    def _timings(self, train_seconds: float) -> dict[str, float]:
        """Return the seconds of each phase so far, and of the step without validation and checkpoint."""
        phases = {name: float(seconds) for name, seconds in self.timer.get_timing_metrics("sum").items()}
        return phases | {"total_step_time": train_seconds}

    def _log(self, step: int, train_seconds: float, performance: dict[str, float]) -> None:
        if self.num_restarts:
            performance["num_run_restarts"] = float(self.num_restarts)
        backends = self._parts.logger
        backends.log_metrics(self._metrics, step, prefix="train")
        for prefix, metrics in self._extra.items():
            backends.log_metrics(metrics, step, prefix=prefix)
        backends.log_metrics(self._timings(train_seconds), step, prefix="timing/train")
        backends.log_metrics(performance, step, prefix="performance")
        if self._started_at:
            since_start = time.perf_counter() - self._started_at
            logger.info("First training step done %.1f s after the process started.", since_start)
            backends.log_metrics({"time_to_first_step": since_start}, 0, prefix="timing/setup")
            self._started_at = 0.0
