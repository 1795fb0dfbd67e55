"""Open the folders of a run: logs, checkpoints, and the checkpoint from which it resumes.

They are opened after configuration and data are accepted. Invariant: a folder that cannot hold the run's checkpoints,
and a checkpoint from which the run cannot resume, are refused here, before Ray starts.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.runtime.resume_check import ROWS_CHECKSUM, check_resume
from nemo_rl.algorithms.setup.checkpoint_size import check_space
from nemo_rl.algorithms.setup.run_record import EndOfRun, record_run
from nemo_rl.config import MasterConfig, Role, save_resolved
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.streams.prompt_stream import Prompts
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import get_next_experiment_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolders:
    """The folders of a run."""

    log_dir: Path
    """The run's `exp_NNN`."""
    checkpoints: CheckpointManager | None
    """Folder of the checkpoints; None if checkpointing is off."""
    resume_path: Path | None
    """Newest checkpoint; None starts a new run."""
    record_end: EndOfRun
    """Adds the end of the run to its record, see `run_record.record_run`."""
    position: Mapping[str, Any] | None = None
    """Position in the data of that checkpoint."""

    def newest_checkpoint(self) -> Path | None:
        """Return the newest undamaged checkpoint, also one that this run has written, or None if there is none."""
        return None if self.checkpoints is None else self.checkpoints.find_resumable()

    def check_position(self, data: Prompts) -> None:
        """Check that the checkpoint's position, to which the session moves later, belongs to this data.

        Raises:
            DataError: it is a position in other data.
        """
        if self.position is not None:
            data.check_position(dict(self.position))


def open_folders(
    config: MasterConfig, models: Mapping[str, Role], rows: MixedDataset, resources: ExitStack
) -> RunFolders:
    """Lock the checkpoint folder, look for a checkpoint, make the log folder and store the configuration in it.

    Args:
        config: a checked configuration.
        resources: unlocks the checkpoint folder at the end, and records how the run ended.

    Raises:
        CheckpointError: the folder is in use or too small, or all its checkpoints are damaged.
        ConfigError: the folder cannot be written, or the run cannot resume from the newest checkpoint
            (`resume_check`).
    """
    checkpoints, resume_path, position = None, None, None
    if config.checkpointing.enabled:
        checkpoints = CheckpointManager(config.checkpointing)
        checkpoints.claim()
        resources.callback(checkpoints.release)
        resume_path = checkpoints.find_resumable()
        checkpoints.run_info = {ROWS_CHECKSUM: rows.checksum()}
        if resume_path is not None:
            position = check_resume(config, models, resume_path, len(rows), checkpoints.run_info[ROWS_CHECKSUM])
        check_space(config.checkpointing, models, checkpoints, resume_path)
    log_dir = Path(get_next_experiment_dir(config.logger.log_dir))
    save_resolved(config, log_dir / "config.yaml")
    logger.info("Logs of this run: %s", log_dir)
    return RunFolders(log_dir, checkpoints, resume_path, record_run(log_dir, config, resources), position)
