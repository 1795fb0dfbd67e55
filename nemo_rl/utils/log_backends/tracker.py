"""Define the interface of metric trackers, and conversions that all of them need.

The other files of this folder and `utils.logger` implement it. Invariant: a metric is logged as `<prefix>/<name>`, and
a number that is not finite is logged unchanged, never hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, override

from nemo_rl.config.base.hidden_values import HIDDEN, without_secret
from nemo_rl.host.stop_signals import handlers_kept

type Metrics = Mapping[str, Any]
"""Metrics as name -> number; 0-dimensional tensors and NumPy scalars also count as numbers."""

_VARIABLES = ("env_vars", "environment")
"""Keys of sections with environment variables. Some sections use these keys for other values."""


class LoggerInterface(ABC):
    """Destination of metrics."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Errors raised when the destination cannot be reached or written."""
    shows_repeated: ClassVar[bool] = False
    """Whether the destination also gets the metrics of steps that are repeated after a restart."""

    @abstractmethod
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Log scalars of a step under `<prefix>/<name>`.

        Args:
            prefix: group of the metrics, for example `train`.
            step_metric: name of the x-axis in trackers that have several.
            step_finished: whether these are the step's last metrics.
        """

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the run's configuration, a nested mapping."""

    def close(self) -> None:
        """Write pending output. Do nothing by default."""
        return None


class RunTracker(LoggerInterface):
    """Log to a tracker's run object, which `__init__` sets and whose steps are training steps."""

    _run: Any

    @override
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        self._run.log({full_name(prefix, name): value for name, value in to_scalars(metrics).items()}, step=step)

    @override
    def close(self) -> None:
        with handlers_kept():
            self._run.finish()


def full_name(prefix: str | None, name: str) -> str:
    """Return `<prefix>/<name>`, or the name if there is no prefix."""
    return f"{prefix}/{name}" if prefix else name


def to_scalars(metrics: Metrics) -> dict[str, float]:
    """Return the metrics that are single numbers, as floats, including NaN and infinities."""
    scalars = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):
            num_elements = value.numel() if hasattr(value, "numel") else value.size
            value = value.item() if num_elements == 1 else None
        if isinstance(value, bool | int | float):
            scalars[name] = float(value)
    return scalars


def flatten_dict(d: Mapping[str, Any], sep: str = ".", expand_lists: bool = True) -> dict[str, Any]:
    """Flatten nested mappings into one level.

    Args:
        d: the nested mapping.
        sep: separator between names.
        expand_lists: use the index of a list's item as its name; otherwise lists are not split.

    Example:
        >>> flatten_dict({"a": {"b": 1}, "c": [2]})
        {'a.b': 1, 'c.0': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in d.items():
        if expand_lists and isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}{sep}{inner}": leaf for inner, leaf in flatten_dict(value, sep, expand_lists).items()}
        else:
            flat[str(name)] = value
    return flat


def without_secrets(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with values of environment variables, keys and logins of URLs hidden.

    Example:
        >>> without_secrets({"env_vars": {"HF_TOKEN": "hf_1"}, "tracking_uri": "https://me:key@host"})
        {'env_vars': {'HF_TOKEN': '***'}, 'tracking_uri': 'https://***@host'}
    """
    return {name: _shown(str(name), value) for name, value in params.items()}


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        if name in _VARIABLES and all(isinstance(inner, str) for inner in value.values()):
            return dict.fromkeys(value, HIDDEN)
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_shown(name, inner) for inner in value]
    return without_secret(name, value) if isinstance(value, str) else value
