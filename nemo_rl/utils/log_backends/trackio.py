"""Log to Trackio, whose runs are in a database in the run's folder, or on a Space of the Hugging Face hub.

Selected by `logger.trackio_enabled`. Invariant: only this file imports trackio.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl.config import TrackioConfig
from nemo_rl.host.stop_signals import handlers_kept
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, flatten_dict, full_name, to_scalars


class TrackioLogger(LoggerInterface):
    """Logs to one Trackio run; `TRACKIO_DIR=<folder> trackio show` shows it.

    Args:
        cfg: the section `logger.trackio`.
        log_dir: folder of the run's database, unless TRACKIO_DIR names another.

    Raises:
        ConfigError: Trackio cannot start the run, or reach its Space.
    """

    failures = (OSError, RuntimeError, ValueError)

    def __init__(self, cfg: TrackioConfig, log_dir: str | Path):
        os.environ.setdefault("TRACKIO_DIR", str(Path(log_dir).absolute()))
        import trackio  # reads the variable

        try:
            with handlers_kept():
                self._run = trackio.init(
                    project=cfg.project, name=cfg.name, space_id=cfg.space_id, auto_log_gpu=False, embed=False
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"logger.trackio_enabled=true: {error} Check the network and HF_TOKEN, or set "
                "logger.trackio.space_id=null, which keeps the run in its own folder."
            ) from error

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """See `LoggerInterface.log_metrics`."""
        self._run.log({full_name(prefix, name): value for name, value in to_scalars(metrics).items()}, step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `LoggerInterface.log_hyperparams`."""
        self._run.config.update(flatten_dict(params, expand_lists=False))

    def close(self) -> None:
        """See `LoggerInterface.close`."""
        with handlers_kept():
            self._run.finish()
