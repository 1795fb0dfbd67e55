"""What a metric tracker offers. Law: a metric is logged as `<prefix>/<name>`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class LoggerInterface(ABC):
    """A place where metrics go."""

    @abstractmethod
    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str = "", step_metric: str | None = None
    ) -> None:
        """Log scalars of a step under `<prefix>/<name>`."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the run's configuration."""

    @abstractmethod
    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a distribution."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is pending."""


def full_name(prefix: str | None, name: str) -> str:
    """`<prefix>/<name>`."""
    return f"{prefix}/{name}" if prefix else name


def flatten(params: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{parent}.{name}" if parent else str(name)
        if isinstance(value, Mapping):
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat
