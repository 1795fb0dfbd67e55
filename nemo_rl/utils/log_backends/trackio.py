"""Log to Trackio, whose runs are in a database in the run's folder, or in a Space of the Hugging Face hub.

Selected by `logger.trackio_enabled`. Invariant: only this file imports trackio.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, override

from nemo_rl.config import TrackioConfig
from nemo_rl.host.stop_signals import handlers_kept
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.tracker import RunTracker, flatten_dict


class TrackioLogger(RunTracker):
    """Log to one Trackio run. `TRACKIO_DIR=<folder> trackio show` displays it.

    Args:
        log_dir: folder of the run's database, unless TRACKIO_DIR names another.

    Raises:
        ConfigError: Trackio cannot start the run, or reach its Space, or has another run's folder in this process.
    """

    failures = (OSError, RuntimeError, ValueError)
    _first_folder: ClassVar[str | None] = None

    def __init__(self, cfg: TrackioConfig, log_dir: str | Path):
        folder = str(Path(log_dir).absolute())
        if os.environ.get("TRACKIO_DIR", "") == TrackioLogger._first_folder != folder:
            raise ConfigError(
                f"logger.trackio_enabled=true: a run of this process reports to {TrackioLogger._first_folder} already, "
                "and Trackio keeps the folder of its first run. Start each run in a process of its own, or set "
                "TRACKIO_DIR to one folder for all of them."
            )
        if "TRACKIO_DIR" not in os.environ:
            os.environ["TRACKIO_DIR"] = TrackioLogger._first_folder = folder
        import trackio  # reads the variable when it is imported

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

    @override
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._run.config.update(flatten_dict(params, expand_lists=False))
