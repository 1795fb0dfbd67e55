"""Log to SwanLab (extra `swanlab`), which works offline with SWANLAB_MODE=offline.

Selected by `logger.swanlab_enabled`. Invariant: only this file imports swanlab.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

import swanlab
from swanlab.exceptions import AuthenticationError, DataStoreError

from nemo_rl.config import SwanlabConfig
from nemo_rl.host.stop_signals import handlers_kept
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.tracker import RunTracker


class SwanlabLogger(RunTracker):
    """Log to one SwanLab run. SwanLab itself ignores write errors.

    Args:
        log_dir: folder of the run's files; None takes SwanLab's default.

    Raises:
        ConfigError: SwanLab cannot be reached, or rejects the key.
    """

    failures = (OSError, AuthenticationError, DataStoreError)

    def __init__(self, cfg: SwanlabConfig, log_dir: str | Path | None = None):
        folder = None if log_dir is None else str(log_dir)
        try:
            with handlers_kept():  # SwanLab's SIGINT handler would end the program
                self._run = swanlab.init(project=cfg.project, name=cfg.name, log_dir=folder)
        except (AuthenticationError, RuntimeError) as error:
            raise ConfigError(
                f"logger.swanlab_enabled=true: {error} Check the network and SWANLAB_API_KEY, or set "
                "SWANLAB_MODE=offline."
            ) from error

    @override
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._run.config.update(dict(params))
