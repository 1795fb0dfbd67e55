"""Open the folders of a run for logs and checkpoints, and find the checkpoint from which it resumes.

The folders are opened after configuration and data are accepted. The expected size of a checkpoint is the size of the
checkpoint from which the run resumes. A new run uses the estimates of the trained models' backends. Invariant: before
Ray starts, a folder without space and a checkpoint that does not fit the run are refused here.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.runtime.resume_check import ROWS_CHECKSUM, check_resume
from nemo_rl.algorithms.setup.run_record import EndOfRun, record_run
from nemo_rl.config import CheckpointingConfig, MasterConfig, Role, save_resolved, trained
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.streams.prompt_stream import Prompts
from nemo_rl.files.manifest import manifest_bytes
from nemo_rl.host.capacity import free_bytes, readable_bytes
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.utils.logger import get_next_experiment_dir
from nemo_rl.utils.logging_setup import log_to

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolders:
    """The folders of a run."""

    log_dir: Path
    """Log folder of the run, `exp_NNN`."""
    checkpoints: CheckpointManager | None
    """Manager of the checkpoint folder. None if checkpointing is off."""
    resume_path: Path | None
    """Step folder of the newest checkpoint. None for a new run."""
    record_end: EndOfRun
    """Function that adds the run's end to its record (`run_record.record_run`)."""
    position: Mapping[str, Any] | None = None
    """Position in the data that the checkpoint `resume_path` stores."""

    def newest_checkpoint(self) -> Path | None:
        """Return the newest undamaged checkpoint, which may be from this run, or None if there is none."""
        return None if self.checkpoints is None else self.checkpoints.find_resumable()

    def check_position(self, data: Prompts) -> None:
        """Check that the checkpoint's data position is valid for this data. The session moves to the position later.

        Raises:
            DataError: The position belongs to other data.
        """
        if self.position is not None:
            data.check_position(dict(self.position))


def open_folders(
    config: MasterConfig, models: Mapping[str, Role], rows: MixedDataset, resources: ExitStack
) -> RunFolders:
    """Lock the checkpoint folder, find a checkpoint, make the log folder, and store the configuration in it.

    Args:
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
    resources.enter_context(log_to(log_dir))
    logger.info("Logs of this run: %s", log_dir)
    return RunFolders(log_dir, checkpoints, resume_path, record_run(log_dir, config, resources), position)


def checkpoint_sizes(models: Mapping[str, Role], checkpointing: CheckpointingConfig) -> dict[str, int] | None:
    """Estimate the size in bytes of each trained model in a checkpoint. Return None if a backend has no estimate."""
    sizes = {
        name: training_backend(role.section).checkpoint_bytes(role.section, checkpointing)
        for name, role in trained(models).items()
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    return known if len(known) == len(sizes) else None


def check_space(
    checkpointing: CheckpointingConfig,
    models: Mapping[str, Role],
    checkpoints: CheckpointManager,
    resume_path: Path | None,
) -> None:
    """Compare the free bytes with the bytes that a run will write.

    Raises:
        CheckpointError: There is no space for the next checkpoint. If only later ones do not fit, a warning is logged.
    """
    one = _written_bytes(models, resume_path)
    if one is None:
        sizes = checkpoint_sizes(models, checkpointing)
        one = None if sizes is None else sum(sizes.values())
    if one is None:
        return
    checkpoints.expected_bytes = one
    require_space(checkpointing, one, len(checkpoints.steps()))


def _written_bytes(models: Mapping[str, Role], path: Path | None) -> int | None:
    """Return the size of a checkpoint folder in bytes, or None if it is missing or lacks a trained model."""
    if path is None or not all((path / name).exists() for name in trained(models)):
        return None
    return manifest_bytes(path)


def require_space(checkpointing: CheckpointingConfig, one: int, present: int) -> None:
    """Raise an error if a checkpoint of `one` bytes does not fit. Warn if later checkpoints will not fit.

    Raises:
        CheckpointError: There is no space for the next checkpoint.
    """
    folder = Path(checkpointing.checkpoint_dir).absolute()
    free = free_bytes(folder)
    sizes = f"a checkpoint takes about {readable_bytes(one)}, {readable_bytes(free)} are free"
    if free < one:
        raise CheckpointError(
            f"no space for a checkpoint in {folder}: {sizes}. Free space, choose another "
            "checkpointing.checkpoint_dir, or set checkpointing.save_optimizer=false (a third of the size, but a "
            "resumed run starts the optimizer again)."
        )
    to_come = checkpoints_at_once(checkpointing) - present
    if free < to_come * one:
        logger.warning(
            "Space in %s may run out: %s, and up to %d more are kept at a time (checkpointing.keep_top_k).",
            *(folder, sizes, to_come),
        )


def checkpoints_at_once(checkpointing: CheckpointingConfig) -> int:
    """Return the largest number of checkpoints on the disk at once: best, newest, and the one being written."""
    return 2 if checkpointing.keep_top_k is None else checkpointing.keep_top_k + 2
