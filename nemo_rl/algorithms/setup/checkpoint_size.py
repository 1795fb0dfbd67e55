"""Whether the disk has room for the checkpoints of a run.

The size is that of the checkpoint a run goes on from, otherwise what the training backend estimates.
"""

import logging
from pathlib import Path

from nemo_rl.config import CheckpointingConfig, MasterConfig
from nemo_rl.files.manifest import manifest_bytes
from nemo_rl.host.disk_space import free_bytes, readable_bytes
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)


def check_space(config: MasterConfig, checkpoints: CheckpointManager, resume_path: Path | None) -> None:
    """Compare the free bytes with what a run will write: refuse without room for one checkpoint, warn without for all.

    Raises:
        CheckpointError: not even the next checkpoint fits.
    """
    one = None if resume_path is None else manifest_bytes(resume_path)
    if one is None:
        one = training_backend(config.policy).checkpoint_bytes(config.policy, config.checkpointing)
    if one is None:
        return
    checkpoints.expected_bytes = one
    require_space(config.checkpointing, one, len(checkpoints.steps()))


def require_space(checkpointing: CheckpointingConfig, one: int, present: int) -> None:
    """Refuse a disk without room for a checkpoint of `one` bytes; warn where `present` and those to come do not fit.

    Raises:
        CheckpointError: not even the next checkpoint fits.
    """
    folder = Path(checkpointing.checkpoint_dir).absolute()
    free = free_bytes(folder)
    sizes = f"a checkpoint takes about {readable_bytes(one)}, {readable_bytes(free)} are free"
    if free < one:
        raise CheckpointError(
            f"no space for a checkpoint in {folder}: {sizes}. Free some, choose another "
            "checkpointing.checkpoint_dir, or set checkpointing.save_optimizer=false (a third of the size, but a "
            "resumed run starts the optimizer anew)."
        )
    to_come = checkpoints_at_once(checkpointing) - present
    if free < to_come * one:
        logger.warning(
            "Space in %s may run out: %s, and up to %d more are kept at a time (checkpointing.keep_top_k).",
            *(folder, sizes, to_come),
        )


def checkpoints_at_once(checkpointing: CheckpointingConfig) -> int:
    """Checkpoints on the disk while one is written: the best, the newest, the one that comes."""
    return 2 if checkpointing.keep_top_k is None else checkpointing.keep_top_k + 2
