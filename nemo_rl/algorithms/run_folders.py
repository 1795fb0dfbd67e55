"""Where a run writes, and where it goes on from.

The first thing that the `assemble` files of all algorithms do once a configuration is accepted.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config import MasterConfig, save_resolved
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
    """

    log_dir: Path
    checkpoints: CheckpointManager | None
    resume_path: Path | None


def open_folders(config: MasterConfig) -> RunFolders:
    """Make the log folder, store the resolved configuration in it, and look for a checkpoint."""
    checkpoints = CheckpointManager(config.checkpointing) if config.checkpointing.enabled else None
    latest = checkpoints.get_latest_checkpoint_path() if checkpoints is not None else None
    log_dir = Path(get_next_experiment_dir(config.logger.log_dir))
    save_resolved(config, log_dir / "config.yaml")
    logger.info("Logs of this run: %s", log_dir)
    return RunFolders(log_dir, checkpoints, None if latest is None else Path(latest))
