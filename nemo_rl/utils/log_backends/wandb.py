"""Log to Weights & Biases, which works offline with WANDB_MODE=offline.

Selected by `logger.wandb_enabled`. Invariant: only this file imports wandb.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

import wandb

from nemo_rl.config import WandbConfig
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, full_name, to_scalars

_PREFIXES = ("train", "validation", "timing/train", "timing/validation", "performance", "refit")


class WandbLogger(LoggerInterface):
    """Log to one W&B run."""

    failures = (OSError, wandb.Error)

    def __init__(self, cfg: WandbConfig, log_dir: str | Path):
        self._run = wandb.init(project=cfg.project, name=cfg.name, entity=cfg.entity, dir=str(log_dir))
        for prefix in _PREFIXES:
            self.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
        self.define_metric("ray/*", step_metric="ray/ray_step")

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Give a metric, or all metrics of a pattern, a separate x-axis."""
        if step_metric is not None:
            self._run.define_metric(step_metric)
        self._run.define_metric(name, step_metric=step_metric)

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Log metrics. Each prefix has its own step axis."""
        values: dict[str, Any] = {full_name(prefix, name): value for name, value in to_scalars(metrics).items()}
        values[step_metric or full_name(prefix, "step")] = step
        self._run.log(values)

    @override
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._run.config.update(dict(params))

    @override
    def close(self) -> None:
        self._run.finish()
