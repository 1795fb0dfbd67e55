"""Start the validations of a run, and log their metrics when they are finished.

    session ─ start(step) ─► InTurn: validates now, while training waits
                             another part: starts and returns (`rollout.validation.BackgroundValidation`)
    session ◄─ log_finished ─ the metrics: immediately, or after a later step

Metrics are logged under the step at which the validation started. Invariant: at most one validation runs.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl.config import CheckpointingConfig
from nemo_rl.config.base.names import VALIDATION_METRICS
from nemo_rl.utils.errors import CheckpointError, ConfigError, did_you_mean
from nemo_rl.utils.logger import Logger

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationResult:
    """A finished validation."""

    step: int
    """Training step after which the validation started."""
    metrics: dict[str, float]
    """Metrics by name. A metric of a named data set has the name `validation-<set>/<name>`."""
    seconds: float
    """Duration of the validation in seconds."""
    waited_s: float
    """Seconds for which training waited for the validation."""

    @property
    def by_set(self) -> dict[str, dict[str, float]]:
        """Return metrics by the prefix under which they are logged: `validation`, or the prefix of a named data set."""
        groups: dict[str, dict[str, float]] = {}
        for name, value in self.metrics.items():
            prefix, _, bare = name.partition("/")
            if not prefix.startswith("validation-"):
                prefix, bare = "validation", name
            groups.setdefault(prefix, {})[bare] = value
        return groups

    @property
    def saved(self) -> dict[str, float]:
        """Return metrics by their names in a checkpoint: `val:<name>`, or `val:validation-<set>_<name>`."""
        return {
            f"val:{'' if prefix == 'validation' else f'{prefix}_'}{name}": value
            for prefix, group in self.by_set.items()
            for name, value in group.items()
        }


class Validation(Protocol):
    """Interface that measures the policy on held-out data, possibly while training goes on."""

    def start(self, step: int) -> None:
        """Start to validate the policy after `step`. No other validation may be running."""

    def finished(self, *, wait: bool) -> ValidationResult | None:
        """Return the result once. Return None if there is no result, or if it is not ready and `wait` is false.

        Raises:
            Exception: The failure of the validation.
        """

    def cancel(self) -> None:
        """Cancel the running validation."""


@dataclass
class InTurn:
    """Validation for which training waits."""

    validate: Callable[[int], dict[str, float]]
    """Function that validates after a step and returns metrics."""
    _result: ValidationResult | None = field(default=None, init=False)

    def start(self, step: int) -> None:
        """Validate, and return when the validation is finished."""
        started = time.perf_counter()
        metrics = self.validate(step)
        seconds = time.perf_counter() - started
        self._result = ValidationResult(step, metrics, seconds, waited_s=seconds)

    def finished(self, *, wait: bool) -> ValidationResult | None:
        """Return the result once, as `Validation.finished` does."""
        result, self._result = self._result, None
        return result

    def cancel(self) -> None:
        """Do nothing, because no validation runs in the background."""


_FIRST_SHOWN = ("accuracy", "val_loss", "loss", "preference_loss")
_SHOWN_IF_ANY = ("num_reward_errors", "truncation_rate")
_ROOM = 112
"""Number of characters of a console line that are available for the metrics of a validation."""


@dataclass
class Validations:
    """The validations of a session."""

    validation: Validation | None
    """Validation to start. None without validation data."""
    metrics: Logger
    """Backends that the metrics are logged to."""
    checkpointing: CheckpointingConfig | None
    """The section `checkpointing` if the run saves checkpoints, or else None."""
    stop_metric: str | None
    """Metric that may end the run."""
    stop_threshold: float | None
    """Value of the metric at which the run ends."""
    started_step: int | None = field(default=None, init=False)
    """Step of the last validation that was started. None before the first validation."""
    running_step: int | None = field(default=None, init=False)
    """Step of the running validation. None if no validation runs."""

    def start(self, step: int) -> None:
        """Start a validation. The previous validation must be finished."""
        if self.validation is not None:
            self.validation.start(step)
            self.started_step = self.running_step = step

    def log_finished(self, *, wait: bool) -> ValidationResult | None:
        """Log the metrics of the started validation and return its result, or None if it is not ready.

        Raises:
            ConfigError: Checkpoints are to be ranked by a metric that the validation does not report.
            Exception: The failure of the validation.
        """
        result = None if self.validation is None else self.validation.finished(wait=wait)
        if result is None:
            return None
        self.running_step = None
        for prefix, group in result.by_set.items():
            self.metrics.log_metrics(group, result.step, prefix=prefix)
        seconds = {"total_validation_time": result.seconds, "exposed_validation_time": result.waited_s}
        self.metrics.log_metrics(seconds, result.step, prefix="timing/validation")
        every = "  ".join(f"{name}={value:.4g}" for name, value in result.metrics.items())
        shown = in_one_line(result.metrics)
        logger.info(
            "validation after step %d: %s (%.1f s)", result.step, shown, result.seconds, extra={"details": every}
        )
        self._check_ranking_metric(result.saved)
        return result

    def cancel(self) -> None:
        """Cancel the running validation, because the run has to end."""
        if self.validation is not None:
            self.validation.cancel()
        self.running_step = None

    def _check_ranking_metric(self, saved: Mapping[str, float]) -> None:
        """Raise an error if validation does not report the configured ranking metric."""
        asked = (self.checkpointing.metric_name or "") if self.checkpointing is not None else ""
        chosen = asked.startswith("val:") and asked != CheckpointingConfig.model_fields["metric_name"].default
        if chosen and asked not in saved:
            raise ConfigError(
                f"checkpointing.metric_name={asked} is not reported by validation."
                f"{did_you_mean(asked, sorted(saved))} There are: {', '.join(sorted(saved))}."
            )

    def stop_reason(self, metrics: Mapping[str, float]) -> str | None:
        """Return why the run has to stop after a validation with these metrics, or None if it continues.

        Raises:
            CheckpointError: the validation does not report `stop_metric`.
        """
        metric, threshold = self.stop_metric, self.stop_threshold
        if metric is None or threshold is None:
            return None
        if metric not in metrics:
            if metric in VALIDATION_METRICS:
                return None  # no answer could be graded
            raise CheckpointError(
                f"stop_at_validation_metric={metric} is not a validation metric. Choose one of {sorted(metrics)}."
            )
        if metrics[metric] < threshold:
            return None
        return f"validation {metric}={metrics[metric]:.4g} reached {threshold:g}"


def in_one_line(metrics: Mapping[str, float]) -> str:
    """Format the metrics of a validation for one line of the console.

    Metrics of all samples come first, then metrics of single environments. Values of environments that equal the total
    are left out, and so are error counts of 0. The line ends with " ..." if not all metrics fit.
    """
    names = sorted(metrics, key=lambda name: (name not in _FIRST_SHOWN, "/" in name))
    shown: list[str] = []
    for name in names:
        whole = name.rpartition("/")[2]
        if (whole != name and metrics.get(whole) == metrics[name]) or (name in _SHOWN_IF_ANY and not metrics[name]):
            continue
        shown.append(f"{name}={metrics[name]:.4g}")
        if len("  ".join(shown)) > _ROOM:
            return "  ".join([*shown[:-1], "..."])
    return "  ".join(shown)
