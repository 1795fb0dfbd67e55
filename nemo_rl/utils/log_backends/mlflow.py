"""Log to MLflow (extra `mlflow`).

Selected by `logger.mlflow_enabled`. Invariant: only this file imports mlflow.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

import mlflow
from mlflow.exceptions import MlflowException

from nemo_rl.config import MlflowConfig
from nemo_rl.config.rules.trackers import tracking_address
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, flatten_dict, full_name, to_scalars

_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
"""Largest number of metrics that MLflow's servers accept in one call."""
_LONGEST_VALUE = 500
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Settings with which MLflow gives up early. With MLflow's defaults, the run would wait minutes for retries."""


class MLflowLogger(LoggerInterface):
    """Log to one MLflow run.

    Args:
        log_dir: folder of the database and the artifacts, unless `tracking_uri` or MLFLOW_TRACKING_URI is set.
    """

    failures = (OSError, MlflowException)

    def __init__(self, cfg: MlflowConfig, log_dir: str | Path | None = None):
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        artifact_location = cfg.artifact_location
        address = tracking_address(cfg)
        if address is None and log_dir is not None:
            folder = Path(log_dir).absolute()
            address, artifact_location = (
                f"sqlite:///{folder / 'mlflow.db'}",
                artifact_location or str(folder / "artifacts"),
            )
        if address is not None:
            mlflow.set_tracking_uri(address)
        if cfg.experiment_name:
            if artifact_location and mlflow.get_experiment_by_name(cfg.experiment_name) is None:
                mlflow.create_experiment(cfg.experiment_name, artifact_location=artifact_location)
            mlflow.set_experiment(cfg.experiment_name)
        # MLflow keeps the active run per thread, and the monitor of the machines logs from another thread.
        self._run_id: str = mlflow.start_run(run_id=cfg.run_id, run_name=cfg.run_name).info.run_id

    @override
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        values = {full_name(prefix, name): value for name, value in to_scalars(metrics).items()}
        items = list(values.items())
        for start in range(0, len(items), _METRICS_PER_CALL):
            mlflow.log_metrics(dict(items[start : start + _METRICS_PER_CALL]), step=step, run_id=self._run_id)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log hyperparameters. Long values are cut to MLflow's limit."""
        flat = flatten_dict(params, expand_lists=False)
        items = [(name, str(value)[:_LONGEST_VALUE]) for name, value in flat.items()]
        for start in range(0, len(items), _PARAMS_PER_CALL):
            mlflow.log_params(dict(items[start : start + _PARAMS_PER_CALL]), run_id=self._run_id)

    @override
    def close(self) -> None:
        mlflow.end_run()
