"""MLflow tracking (extra `mlflow`).

Chosen by `logger.mlflow_enabled`. Invariant: the only file that imports mlflow.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from nemo_rl.config import MlflowConfig
from nemo_rl.utils.log_backends.interface import LoggerInterface, Metrics, flatten_dict, full_name, to_scalars

_PARAMS_PER_CALL = 100
_LONGEST_VALUE = 500


class MLflowLogger(LoggerInterface):
    """Logs to one MLflow run.

    Args:
        cfg: the `logger.mlflow` section.
        log_dir: unused; MLflow keeps its files where `tracking_uri` says.
    """

    failures = (OSError, MlflowException)

    def __init__(self, cfg: MlflowConfig, log_dir: str | Path | None = None):
        if cfg.tracking_uri:
            mlflow.set_tracking_uri(cfg.tracking_uri)
        if cfg.experiment_name:
            if cfg.artifact_location and mlflow.get_experiment_by_name(cfg.experiment_name) is None:
                mlflow.create_experiment(cfg.experiment_name, artifact_location=cfg.artifact_location)
            mlflow.set_experiment(cfg.experiment_name)
        mlflow.start_run(run_id=cfg.run_id, run_name=cfg.run_name)

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """See `LoggerInterface.log_metrics`."""
        values = {full_name(prefix, name): value for name, value in to_scalars(metrics).items()}
        mlflow.log_metrics(values, step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `LoggerInterface.log_hyperparams`; long values are cut as MLflow demands."""
        flat = flatten_dict(params, expand_lists=False)
        items = [(name, str(value)[:_LONGEST_VALUE]) for name, value in flat.items()]
        for start in range(0, len(items), _PARAMS_PER_CALL):
            mlflow.log_params(dict(items[start : start + _PARAMS_PER_CALL]))

    def close(self) -> None:
        """See `LoggerInterface.close`."""
        mlflow.end_run()
