"""Check that the disk has room for the checkpoints of a run.

The size is that of the checkpoint from which a run resumes, or the sum of what the backends of the trained models
estimate.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.config import CheckpointingConfig, Role, trained
from nemo_rl.files.manifest import manifest_bytes
from nemo_rl.host.capacity import free_bytes, readable_bytes
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)


def checkpoint_sizes(models: Mapping[str, Role], checkpointing: CheckpointingConfig) -> dict[str, int] | None:
    """Estimate the bytes of each trained model in a checkpoint, by name, or None if a backend has no estimate."""
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
    """Compare free bytes with the run's checkpoints, refuse if one does not fit, and warn if all do not fit.

    Raises:
        CheckpointError: not even the next checkpoint fits.
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
    """Return the bytes of a checkpoint on the disk, or None if there is none or it lacks a trained model."""
    if path is None or not all((path / name).exists() for name in trained(models)):
        return None
    return manifest_bytes(path)


def require_space(checkpointing: CheckpointingConfig, one: int, present: int) -> None:
    """Refuse a disk without room for a checkpoint of `one` bytes, and warn if the later ones will not fit.

    Args:
        one: bytes of one checkpoint.
        present: number of checkpoints on the disk.

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
            "resumed run starts the optimizer again)."
        )
    to_come = checkpoints_at_once(checkpointing) - present
    if free < to_come * one:
        logger.warning(
            "Space in %s may run out: %s, and up to %d more are kept at a time (checkpointing.keep_top_k).",
            *(folder, sizes, to_come),
        )


def checkpoints_at_once(checkpointing: CheckpointingConfig) -> int:
    """Return the checkpoints on the disk while one is written: the best ones, the newest, and the one being written."""
    return 2 if checkpointing.keep_top_k is None else checkpointing.keep_top_k + 2
