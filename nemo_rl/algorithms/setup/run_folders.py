"""Where a run writes, and where it goes on from.

Opened once configuration and data are accepted. Invariant: a
folder that cannot hold the run's checkpoints, and a checkpoint that the run cannot go on from, are refused here, before
Ray starts.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.runtime.resume_check import check_resume
from nemo_rl.algorithms.setup.checkpoint_size import check_space
from nemo_rl.config import MasterConfig, save_resolved
from nemo_rl.data.prompt_stream import PromptStream
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import get_next_experiment_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolders:
    """Where a run writes, and where it goes on from.

    Attributes:
        log_dir: this run's `exp_NNN`.
        checkpoints: None when checkpointing is off.
        resume_path: newest checkpoint, None to start fresh.
        position: its position in the data.
    """

    log_dir: Path
    checkpoints: CheckpointManager | None
    resume_path: Path | None
    position: Mapping[str, Any] | None = None

    def check_position(self, data: PromptStream) -> None:
        """Say why the run cannot go on from the checkpoint's position; the session goes there.

        Raises:
            DataError: it is the position in other data.
        """
        if self.position is not None:
            data.check_position(dict(self.position))


def open_folders(config: MasterConfig, num_rows: int, resources: ExitStack) -> RunFolders:
    """Claim the checkpoint folder, look for a checkpoint, make the log folder and store the configuration in it.

    Args:
        config: a checked configuration.
        num_rows: rows of the training data.
        resources: gives the checkpoint folder back at the end.

    Raises:
        CheckpointError: the folder is in use or too small, or all its checkpoints are damaged.
        ConfigError: the folder cannot be written, or the run cannot go on from the newest checkpoint (`resume_check`).
    """
    checkpoints, resume_path, position = None, None, None
    if config.checkpointing.enabled:
        checkpoints = CheckpointManager(config.checkpointing)
        checkpoints.claim()
        resources.callback(checkpoints.release)
        resume_path = checkpoints.find_resumable()
        if resume_path is not None:
            position = check_resume(config, resume_path, num_rows)
        check_space(config, checkpoints, resume_path)
    log_dir = Path(get_next_experiment_dir(config.logger.log_dir))
    save_resolved(config, log_dir / "config.yaml")
    logger.info("Logs of this run: %s", log_dir)
    return RunFolders(log_dir, checkpoints, resume_path, position)
