"""One logger for a run, fanning out to the console and the trackers that are switched on.

Law: every backend gets the same numbers under the same names.
"""

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.config import LoggerConfig
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.console import ConsoleLogger
from nemo_rl.utils.log_backends.interface import LoggerInterface

_EXPERIMENT = re.compile(r"^exp_(\d+)$")


def get_next_experiment_dir(base_log_dir: str | Path) -> str:
    """Make and return `<base_log_dir>/exp_NNN`, one after the highest there is."""
    base = Path(base_log_dir).absolute()
    base.mkdir(parents=True, exist_ok=True)
    numbers = [int(m.group(1)) for m in (_EXPERIMENT.match(e.name) for e in base.iterdir()) if m]
    number = max(numbers, default=0)
    while True:
        number += 1
        folder = base / f"exp_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)


class Logger(LoggerInterface):
    """Fans out to all backends.

    Args:
        cfg: the `logger` section.
        log_dir: this run's folder.
        total_steps: for the console's progress bar.

    Raises:
        ConfigError: a tracker is on and its library is not installed.
    """

    def __init__(self, cfg: LoggerConfig, log_dir: str | Path, total_steps: int | None = None):
        self.log_dir = Path(log_dir)
        self._backends = make_backends(cfg, self.log_dir, total_steps)

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str = "", step_metric: str | None = None
    ) -> None:
        """See `LoggerInterface.log_metrics`; values that are not finite numbers stay out of trackers' way."""
        numbers = {name: float(v) for name, v in metrics.items() if math.isfinite(float(v))}
        for backend in self._backends:
            backend.log_metrics(numbers, step, prefix, step_metric)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `LoggerInterface.log_hyperparams`."""
        for backend in self._backends:
            backend.log_hyperparams(params)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """See `LoggerInterface.log_histogram`."""
        for backend in self._backends:
            backend.log_histogram(histogram, step, name)

    def close(self) -> None:
        """Close all backends."""
        for backend in self._backends:
            backend.close()


def make_backends(cfg: LoggerConfig, log_dir: Path, total_steps: int | None) -> list[LoggerInterface]:
    """The console and every tracker that is on; a tracker's library is imported only then."""
    backends: list[LoggerInterface] = [ConsoleLogger(total_steps)]
    if cfg.tensorboard_enabled:
        from nemo_rl.utils.log_backends.tensorboard import TensorboardLogger

        backends.append(TensorboardLogger(log_dir / "tensorboard"))
    if cfg.wandb_enabled:
        _require("wandb", "logger.wandb_enabled", "wandb")
        from nemo_rl.utils.log_backends.wandb import WandbLogger

        (log_dir / "wandb").mkdir(exist_ok=True)
        backends.append(WandbLogger(cfg.wandb, log_dir / "wandb"))
    if cfg.mlflow_enabled:
        _require("mlflow", "logger.mlflow_enabled", "--extra mlflow")
        from nemo_rl.utils.log_backends.mlflow import MLflowLogger

        backends.append(MLflowLogger(cfg.mlflow))
    return backends


def _require(library: str, key: str, how: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{key}=true needs {library}, which is not installed. Install it ({how}) or set {key}=false.")
