"""What a run that goes on from a checkpoint has to have in common with the run that wrote it.

Before Ray starts. Three things are compared: the configuration (`config.rules.resume` says what may change), the
training data's number of rows, and whether the optimizer's state is there.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config import MasterConfig
from nemo_rl.config.rules.resume import ChangedKey, changed_keys
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.huggingface.folders import CONSOLIDATED_FOLDER, MODEL_FOLDER
from nemo_rl.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

DATA_POSITION_FILE = "train_dataloader.pt"
_CONFIG_FILE = "config.yaml"


def check_resume(config: MasterConfig, path: Path, num_rows: int) -> Mapping[str, Any]:
    """Say what has changed, and refuse what a resumed run cannot take over.

    Args:
        config: of this run.
        path: the step folder it goes on from.
        num_rows: rows of its training data.

    Returns:
        The position in the data.

    Raises:
        ConfigError: something changed that `checkpointing.allow_changed` does not name.
        CheckpointError: the checkpoint's configuration or data position cannot be read.
    """
    stored = _stored_config(path)
    _check_backend(config, path, stored)
    _check_config(config, path, stored)
    position = _check_data(config, path, num_rows)
    _check_optimizer(config, path, stored)
    return position


def _stored_config(path: Path) -> Mapping[str, Any]:
    file = path / _CONFIG_FILE
    try:
        stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}, the configuration of the checkpoint, cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{file} is no configuration.")
    return stored


def _check_backend(config: MasterConfig, path: Path, stored: Mapping[str, Any]) -> None:
    """Refuse training state of another backend, which no key can allow; weights alone can be taken over."""
    before, now = _backend_key(stored), config.policy.backend_key
    if before is None or before == now:
        return
    raise ConfigError(
        f"{path} was written by policy.{before}, and this run trains by policy.{now}. Backends do not read each "
        "other's training checkpoints (weights, optimizer, schedule, random numbers); checkpointing.allow_changed "
        f"cannot change that. Go on with policy.{before}, or start a new run from the weights:\n"
        f"{_start_from(path, before)}"
    )


def _backend_key(stored: Mapping[str, Any]) -> str | None:
    """Section of the backend in a stored configuration; None where it has none, as those of other versions may."""
    policy = stored.get("policy")
    sections = policy if isinstance(policy, Mapping) else {}
    if sections.get("training_backend"):
        return "training_backend"
    return next((key for key in ("megatron_cfg", "dtensor_cfg") if (sections.get(key) or {}).get("enabled")), None)


def _start_from(path: Path, before: str) -> str:
    """Commands and overrides that start a run from the weights of a step folder."""
    model, prepared = path / "policy" / "weights" / MODEL_FOLDER, ""
    if not (model / "config.json").exists():
        model /= CONSOLIDATED_FOLDER
    if not (model / "config.json").exists():
        model = path.with_name(f"{path.name}_hf")
        kind = "megatron" if before == "megatron_cfg" else "dcp"
        prepared = (
            f"  python examples/converters/convert_{kind}_to_hf.py --config {path}/config.yaml "
            f"--{kind}-ckpt-path {path} --hf-ckpt-path {model}\n"
        )
    return f"{prepared}  policy.model_name={model} checkpointing.checkpoint_dir=<a folder of its own>"


def _check_config(config: MasterConfig, path: Path, stored: Mapping[str, Any]) -> None:
    changed = changed_keys(config, stored)
    refused = [change for change in changed if not change.is_applied and not config.checkpointing.allows(change.key)]
    if refused:
        keys = ",".join(change.key for change in refused)
        raise ConfigError(
            f"the run would go on from {path} with other values of keys that a run keeps to its end:\n"
            f"{_listed(refused)}\n"
            "Set them back, give this run a checkpointing.checkpoint_dir of its own, or accept the change with\n"
            f"  checkpointing.allow_changed=[{keys}]"
        )
    if changed:
        logger.info("Changed since %s, and applied from the next step on:\n%s", path, _listed(changed))


def _listed(changes: list[ChangedKey]) -> str:
    return "\n".join(f"  {change}" for change in changes)


def _check_data(config: MasterConfig, path: Path, num_rows: int) -> Mapping[str, Any]:
    position: Mapping[str, Any] = load_plain(path / DATA_POSITION_FILE)
    try:
        before = int(position["loader"]["num_rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / DATA_POSITION_FILE} holds no position in training data.") from error
    accepted = any(key.split(".")[0] == "data" for key in config.checkpointing.allow_changed)
    if before != num_rows and not accepted:
        raise ConfigError(
            f"the training data has {num_rows} rows now; it had {before} when {path} was written. Use the same data, "
            "give this run a checkpointing.checkpoint_dir of its own, or go on at the same number of rows of the "
            "changed data with\n  checkpointing.allow_changed=[data.train]"
        )
    return position


def _check_optimizer(config: MasterConfig, path: Path, stored: Mapping[str, Any]) -> None:
    if (path / "policy" / "optimizer").exists():
        return
    saved = stored.get("checkpointing", {}).get("save_optimizer", True)
    if saved and not config.checkpointing.allows("policy.optimizer"):
        raise ConfigError(
            f"{path} has no folder policy/optimizer: the optimizer and the learning-rate schedule would start anew. "
            "Restore the folder, move the step folder away to go on from the checkpoint before it, or accept this "
            "with\n  checkpointing.allow_changed=[policy.optimizer]"
        )
    reason = "" if saved else " (it was written with checkpointing.save_optimizer=false)"
    logger.warning(
        "%s has no optimizer state%s: optimizer, learning-rate schedule and random numbers start anew.", path, reason
    )
