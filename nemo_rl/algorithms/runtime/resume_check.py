"""Check, before Ray starts, that a run can resume from a checkpoint.

The configuration is compared with the stored one (`config.rules.resume` lists the keys that may change). The number and
the checksum of the rows of training data are also compared. For each trained model, the checkpoint must have been
written by the same backend and contain weights and optimizer state. Code of a model's folder must not have changed.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config import CheckpointingConfig, MasterConfig, PolicyConfig, Role, trained
from nemo_rl.config.rules.resume import ChangedKey, changed_keys
from nemo_rl.files.regular_file import read_text
from nemo_rl.files.safe_load import load_plain
from nemo_rl.files.trusted_code import code_files, code_of
from nemo_rl.models.huggingface.folders import CONSOLIDATED_FOLDER, MODEL_FOLDER
from nemo_rl.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

DATA_POSITION_FILE = "train_dataloader.pt"
ROWS_CHECKSUM = "rows_checksum"
"""Key of `training_info.json`: checksum of the rows of the training data."""
_CONFIG_FILE = "config.yaml"


def check_resume(
    config: MasterConfig, models: Mapping[str, Role], path: Path, num_rows: int, checksum: str
) -> Mapping[str, Any]:
    """Log all changes of the configuration and the data, and refuse those that a resumed run cannot make.

    Args:
        models: Models of the run. Those that are trained must be in the checkpoint.
        path: Step folder from which the run resumes.

    Returns:
        The position in the data.

    Raises:
        ConfigError: A value or file has changed that `checkpointing.allow_changed` does not name.
        CheckpointError: The checkpoint's configuration or data position cannot be read.
    """
    stored = _stored_config(path)
    for name, role in trained(models).items():
        _check_backend(name, role.section, path, stored)
    _check_config(config, path, stored)
    for name, role in trained(models).items():
        _check_code(name, role.section, config.checkpointing, path)
    position = _check_data(config, path, num_rows, checksum)
    for name in trained(models):
        _check_state(name, config.checkpointing, path, stored)
    return position


def _stored_config(path: Path) -> Mapping[str, Any]:
    file = path / _CONFIG_FILE
    try:
        stored = yaml.safe_load(read_text(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}, the configuration of the checkpoint, cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{file} is not a configuration.")
    return stored


def _check_backend(name: str, model: PolicyConfig, path: Path, stored: Mapping[str, Any]) -> None:
    """Refuse training state of another backend. `allow_changed` does not allow this change."""
    before, now = _backend_key(stored.get(name)), model.backend_key
    if before is None or before == now:
        return
    raise ConfigError(
        f"{path} was written by {name}.{before}, and this run trains by {name}.{now}. Backends do not read each "
        "other's training checkpoints (weights, optimizer, schedule, random numbers); checkpointing.allow_changed "
        f"cannot change that. Continue with {name}.{before}, or start a new run from the weights:\n"
        f"{_start_from(name, path, before)}"
    )


def _backend_key(stored: Any) -> str | None:
    """Return the key of the backend's section in a stored model section, or None if it has no such section."""
    sections = stored if isinstance(stored, Mapping) else {}
    if sections.get("training_backend"):
        return "training_backend"
    return next((key for key in ("megatron_cfg", "dtensor_cfg") if (sections.get(key) or {}).get("enabled")), None)


def _start_from(name: str, path: Path, before: str) -> str:
    """Return the console lines that explain how to start a run from a model's weights in a step folder."""
    model, prepared = path / name / "weights" / MODEL_FOLDER, ""
    if not (model / "config.json").exists():
        model /= CONSOLIDATED_FOLDER
    if not (model / "config.json").exists():
        written = path if name == "policy" else path / name  # the converters find the policy in a step folder
        model = path.with_name(f"{path.name}_hf" if name == "policy" else f"{path.name}_{name}_hf")
        kind = "megatron" if before == "megatron_cfg" else "dcp"
        prepared = (
            f"  python examples/converters/convert_{kind}_to_hf.py --config {path}/config.yaml "
            f"--{kind}-ckpt-path {written} --hf-ckpt-path {model}\n"
        )
    return f"{prepared}  {name}.model_name={model} checkpointing.checkpoint_dir=<a folder of its own>"


def _check_config(config: MasterConfig, path: Path, stored: Mapping[str, Any]) -> None:
    changed = changed_keys(config, stored)
    refused = [change for change in changed if not change.is_applied and not config.checkpointing.allows(change.key)]
    if refused:
        keys = ",".join(change.key for change in refused)
        raise ConfigError(
            f"the run would resume from {path} with other values of keys that a run keeps to its end:\n"
            f"{_listed(refused)}\n"
            "Set them back, give this run its own checkpointing.checkpoint_dir, or accept the change with\n"
            f"  checkpointing.allow_changed=[{keys}]"
        )
    if changed:
        logger.info("Changed since %s, and applied from the next step on:\n%s", path, _listed(changed))


def _check_code(name: str, model: PolicyConfig, checkpointing: CheckpointingConfig, path: Path) -> None:
    """Refuse Python code of the model that differs from that in the checkpoint."""
    key = f"{name}.trust_remote_code"
    if not model.trust_remote_code or checkpointing.allows(key):
        return
    folder = path / name / "weights" / MODEL_FOLDER
    before = code_files(folder)
    now = code_of(model.model_name, model.tokenizer.name)
    changed = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
    if changed:
        raise ConfigError(
            f"the code of {name}.model_name={model.model_name!r} or its tokenizer has changed since {path} was "
            f"written: {', '.join(changed)}. Restore it (a copy is in {folder}), give this run its own "
            f"checkpointing.checkpoint_dir, or accept the change with\n  checkpointing.allow_changed=[{key}]"
        )


def _listed(changes: list[ChangedKey]) -> str:
    return "\n".join(f"  {change}" for change in changes)


def _check_data(config: MasterConfig, path: Path, num_rows: int, checksum: str) -> Mapping[str, Any]:
    position: Mapping[str, Any] = load_plain(path / DATA_POSITION_FILE)
    try:
        before = int(position["loader"]["num_rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / DATA_POSITION_FILE} holds no position in training data.") from error
    accepted = any(key.split(".")[0] == "data" for key in config.checkpointing.allow_changed)
    if before != num_rows and not accepted:
        raise ConfigError(
            f"the training data has {num_rows} rows now; it had {before} when {path} was written. Use the same data, "
            "give this run its own checkpointing.checkpoint_dir, or continue at the same number of rows of the "
            "changed data with\n  checkpointing.allow_changed=[data.train]"
        )
    if _stored_checksum(path) not in (None, checksum) and not accepted:
        raise ConfigError(
            f"the training data has as many rows as when {path} was written, but their content or order differs. "
            "Use the same data, give this run its own checkpointing.checkpoint_dir, or continue at the same number of "
            "rows of the changed data with\n  checkpointing.allow_changed=[data.train]"
        )
    return position


def _stored_checksum(path: Path) -> str | None:
    """Return the checksum of the rows stored in a step folder, or None if none is stored."""
    try:
        info = json.loads((path / "training_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the load of the run's counters reports an unreadable file
        return None
    found = info.get(ROWS_CHECKSUM) if isinstance(info, dict) else None
    return found if isinstance(found, str) else None


def _check_state(name: str, checkpointing: CheckpointingConfig, path: Path, stored: Mapping[str, Any]) -> None:
    """Refuse a checkpoint without a trained model or its optimizer, unless `allow_changed` names the missing part."""
    if not (path / name).exists() and not checkpointing.allows(name):
        raise ConfigError(
            f"{path} has no folder {name}: this run trains the model {name}, and the run that wrote the checkpoint did "
            f"not. Give this run its own checkpointing.checkpoint_dir, or start {name} from {name}.model_name "
            f"with\n  checkpointing.allow_changed=[{name}]"
        )
    if (path / name / "optimizer").exists():
        return
    saved = stored.get("checkpointing", {}).get("save_optimizer", True)
    if saved and not checkpointing.allows(f"{name}.optimizer"):
        raise ConfigError(
            f"{path} has no folder {name}/optimizer: the optimizer and the learning-rate schedule would start again. "
            "Restore the folder, move the step folder away to resume from the checkpoint before it, or accept this "
            f"with\n  checkpointing.allow_changed=[{name}.optimizer]"
        )
    reason = "" if saved else " (it was written with checkpointing.save_optimizer=false)"
    logger.warning(
        "%s has no optimizer state of %s%s: its optimizer, learning-rate schedule and random numbers start again.",
        *(path, name, reason),
    )
