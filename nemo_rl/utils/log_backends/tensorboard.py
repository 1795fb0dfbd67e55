"""TensorBoard files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard.writer import SummaryWriter

from nemo_rl.utils.log_backends.interface import LoggerInterface, flatten, full_name


class TensorboardLogger(LoggerInterface):
    """Writes event files.

    Args:
        log_dir: folder of the event files.
    """

    def __init__(self, log_dir: str | Path):
        self._writer = SummaryWriter(str(log_dir), flush_secs=10)

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str = "", step_metric: str | None = None
    ) -> None:
        """See `LoggerInterface.log_metrics`; values that are no numbers are left out."""
        for name, value in metrics.items():
            if isinstance(value, bool | int | float) or np.isscalar(value):
                self._writer.add_scalar(full_name(prefix, name), float(value), step)  # type: ignore[arg-type]

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `LoggerInterface.log_hyperparams`; as a text page."""
        lines = [f"    {name}: {value}" for name, value in flatten(params).items()]
        self._writer.add_text("config", "\n".join(lines), 0)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """See `LoggerInterface.log_histogram`."""
        self._writer.add_histogram(name, np.asarray(histogram), step)

    def close(self) -> None:
        """See `LoggerInterface.close`."""
        self._writer.close()
