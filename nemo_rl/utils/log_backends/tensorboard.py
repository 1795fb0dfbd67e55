"""Write TensorBoard event files.

Selected by `logger.tensorboard_enabled`. Invariant: only this file imports TensorBoard.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

from torch.utils.tensorboard.writer import SummaryWriter

from nemo_rl.config import TensorboardConfig
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, flatten_dict, full_name, to_scalars

_FLUSH_S = 10


class TensorboardLogger(LoggerInterface):
    """Write event files."""

    def __init__(self, cfg: TensorboardConfig, log_dir: str | Path):
        self._writer = SummaryWriter(str(log_dir), flush_secs=_FLUSH_S)

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Log metrics. Values that are not numbers are omitted."""
        for name, value in to_scalars(metrics).items():
            self._writer.add_scalar(full_name(prefix, name), value, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters as a text page."""
        lines = [f"    {name}: {value}" for name, value in flatten_dict(params, expand_lists=False).items()]
        self._writer.add_text("config", "\n".join(lines), 0)

    @override
    def close(self) -> None:
        self._writer.close()
