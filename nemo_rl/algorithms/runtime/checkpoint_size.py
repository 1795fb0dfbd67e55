"""Whether the disk has room for the checkpoints of a run.

The size is that of the checkpoint a run goes on from, otherwise an estimate from the number of parameters P, which
counts only what is certain: weights in float32 (4 P bytes, twice while the ranks' parts are joined), two float32
moments of an Adam (8 P bytes), a model to hand on.
"""

import logging
from pathlib import Path

from nemo_rl.config import CheckpointingConfig, MasterConfig, PolicyConfig
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.disk_space import free_bytes, readable_bytes
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.utils.manifest import manifest_bytes

logger = logging.getLogger(__name__)


def check_space(config: MasterConfig, checkpoints: CheckpointManager, resume_path: Path | None) -> None:
    """Compare the free bytes with what a run will write: refuse without room for one checkpoint, warn without for all.

    Raises:
        CheckpointError: not even the next checkpoint fits.
    """
    one = None if resume_path is None else manifest_bytes(resume_path)
    if one is None:
        one = estimate_bytes(config.policy, config.checkpointing)
    if one is None:
        return
    checkpoints.expected_bytes = one
    free = free_bytes(checkpoints.checkpoint_dir)
    sizes = f"a checkpoint takes about {readable_bytes(one)}, {readable_bytes(free)} are free"
    if free < one:
        raise CheckpointError(
            f"no space for a checkpoint in {checkpoints.checkpoint_dir}: {sizes}. Free some, choose another "
            "checkpointing.checkpoint_dir, or set checkpointing.save_optimizer=false (a third of the size, but a "
            "resumed run starts the optimizer anew)."
        )
    to_come = _at_once(config.checkpointing) - len(checkpoints.steps())
    if free < to_come * one:
        logger.warning(
            "Space in %s may run out: %s, and up to %d more are kept at a time (checkpointing.keep_top_k).",
            *(checkpoints.checkpoint_dir, sizes, to_come),
        )


def _at_once(checkpointing: CheckpointingConfig) -> int:
    """Checkpoints on the disk while one is written: the best, the newest, the one that comes."""
    return 2 if checkpointing.keep_top_k is None else checkpointing.keep_top_k + 2


def estimate_bytes(policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
    """Bytes that the disk needs for the first checkpoint, at least; None where the model's size is unknown."""
    parameters = count_parameters(policy.model_name)
    if parameters is None:
        return None
    weights = 4 * parameters
    has_moments = policy.optimizer is not None and "adam" in policy.optimizer.name.lower()
    trains_all = not policy.dtensor_cfg.lora_cfg.enabled
    moments = 2 * weights if checkpointing.save_optimizer and has_moments and trains_all else 0
    to_hand_on = weights if policy.precision == "float32" else weights // 2
    return max(2 * weights, weights + moments + (to_hand_on if checkpointing.save_consolidated else 0))
