"""Manage checkpoint folders: fill a temporary folder, rename it when it is complete, and keep the best checkpoints.

    init_tmp_checkpoint ─► tmp_step_N/ (the caller fills it) ─► finalize_checkpoint ─► step_N/
                                    └─ a write fails: `checkpoint_write` removes it

A crash at any point leaves a complete checkpoint to resume from; the next start removes leftovers. Invariant: a folder
named `step_N` was complete when it got this name, with the checksums of its files in `manifest.json`; the newest one is
never removed.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from pydantic import BaseModel

from nemo_rl.config import CheckpointingConfig, public_values
from nemo_rl.files.folders import FolderLock
from nemo_rl.files.manifest import find_damage, manifest_bytes, replace_file, write_manifest
from nemo_rl.files.regular_file import open_regular, read_text
from nemo_rl.files.writing import write_atomically
from nemo_rl.host.capacity import free_bytes, is_disk_full, readable_bytes
from nemo_rl.utils.errors import CheckpointError, ConfigError, NemoRLError

logger = logging.getLogger(__name__)

_INFO_FILE = "training_info.json"
_CONFIG_FILE = "config.yaml"
_STATUS_FILE = "latest_checkpoint_status.json"
_OPTIMIZER = "policy/optimizer"
_DAMAGE_SHOWN = 3
_COUNTS = ("total_steps", "current_step", "current_epoch", "consumed_samples", "total_valid_tokens")
_STEP = re.compile(r"^step_(\d+)$")

type PathLike = str | os.PathLike[str]


class CheckpointManager:
    """Checkpoints of a run in `checkpoint_dir`.

    Making a manager removes partial folders that a crash left, unless another process is writing there.
    `claim`, or the first `init_tmp_checkpoint`, makes this process the only writer of the folder until it ends.
    """

    def __init__(self, config: CheckpointingConfig):
        self.checkpoint_dir = Path(config.checkpoint_dir).absolute()
        self._metric_name = config.metric_name
        self._metric_is_chosen = config.metric_name != type(config).model_fields["metric_name"].default
        self._higher_is_better = config.higher_is_better
        self._keep_top_k = config.keep_top_k
        self._lock = FolderLock(self.checkpoint_dir)
        self._warned_of_metric = False
        self._unreadable: set[int] = set()
        self.expected_bytes: int | None = None
        """Size of a checkpoint in bytes for messages, or None if it is not known."""
        self.run_info: dict[str, Any] = {}
        """Values about the run that are added to the training info of each checkpoint."""
        if self._lock.acquire():
            self._recover()
            self._lock.release()

    def claim(self) -> None:
        """Create the folder if it is missing, and become its only writer.

        Raises:
            ConfigError: the folder cannot be created or written.
            CheckpointError: another process writes into it.
        """
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            held = self._lock.acquire()
        except OSError as error:
            raise ConfigError(self._not_writable(error.strerror or str(error))) from error
        if held:
            return
        if not os.access(self.checkpoint_dir, os.W_OK):
            raise ConfigError(self._not_writable("it is read-only"))
        raise CheckpointError(
            f"{self.checkpoint_dir} is in use by another run. Give each run its own checkpointing.checkpoint_dir, "
            "or end the other run."
        )

    def release(self) -> None:
        """Let other processes write into the folder."""
        self._lock.release()

    def _not_writable(self, reason: str) -> str:
        return (
            f"checkpointing.checkpoint_dir={self.checkpoint_dir} cannot be written: {reason}. Choose another folder, "
            "or set checkpointing.enabled=false to train without checkpoints."
        )

    def find_resumable(self) -> Path | None:
        """Return the newest checkpoint whose files match their checksums, or None if there is no checkpoint at all.

        Newer damaged checkpoints are logged and renamed to `damaged_step_N`; the folder must be claimed. Files of
        `policy/optimizer` count only while that folder exists, so users may remove it on purpose.

        Raises:
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            damage = self._damage_of(self.checkpoint_dir / f"step_{step}")
            if damage is None:
                self._set_aside(damaged, step)
                return self.checkpoint_dir / f"step_{step}"
            damaged[step] = damage
        if damaged:
            found = "\n".join(f"  step_{step}: {damage}" for step, damage in damaged.items())
            raise CheckpointError(
                f"every checkpoint in {self.checkpoint_dir} is damaged:\n{found}\nRestore the files, or start over "
                "with another checkpointing.checkpoint_dir or after moving these folders away."
            )
        return None

    def _damage_of(self, folder: Path) -> str | None:
        """Describe the damage of a checkpoint, or return None if there is none."""
        try:
            wrong = _wrong_count(self.load_training_info(folder) or {})
            if wrong is not None:
                return wrong
            damage = find_damage(folder)
        except CheckpointError as error:
            return str(error)
        if damage is None:
            logger.warning("%s has no checksums (manifest.json), so its files are used unchecked.", folder)
            return None
        if not (folder / _OPTIMIZER).exists():
            damage = [text for text in damage if not text.startswith(f"{_OPTIMIZER}/")]
        if not damage:
            return None
        return "; ".join(damage[:_DAMAGE_SHOWN]) + ("; ..." if len(damage) > _DAMAGE_SHOWN else "")

    def _set_aside(self, damaged: Mapping[int, str], good_step: int) -> None:
        for step, damage in damaged.items():
            aside = self.checkpoint_dir / f"damaged_step_{step}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(self.checkpoint_dir / f"step_{step}", aside)
            logger.warning(
                "step_%d is damaged: %s. It is renamed to %s; the run continues from step_%d.",
                *(step, damage, aside, good_step),
            )

    def _recover(self) -> None:
        """Restore or remove the folders that a crash left incomplete."""
        for old in sorted(self.checkpoint_dir.glob("old_step_*")):
            step = self.checkpoint_dir / old.name.removeprefix("old_")
            if step.exists():
                _remove(old)
            else:
                logger.warning("Restoring %s, which a crash had left as %s.", step.name, old.name)
                os.replace(old, step)
        for leftover in self.checkpoint_dir.glob("tmp_step_*"):
            logger.warning("Removing %s: a run ended while it was written or removed.", leftover)
            _remove(leftover)

    @staticmethod
    def get_resume_paths(
        last_checkpoint_path: PathLike | None, *, model_component: str = "policy"
    ) -> tuple[Path | None, Path | None]:
        """Return a checkpoint's folder of weights and its folder of the optimizer, or None if that was not saved."""
        if last_checkpoint_path is None:
            return None, None
        component = Path(last_checkpoint_path) / model_component
        optimizer = component / "optimizer"
        return component / "weights", optimizer if optimizer.exists() else None

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: BaseModel | None = None
    ) -> Path:
        """Start a checkpoint in the returned folder, which the caller fills before it calls `finalize_checkpoint`.

        Args:
            training_info: save state and metrics (`val:<name>`, `train:<name>`); numbers may be tensors or
                NumPy scalars.
            run_config: configuration of the run, stored next to the save state.

        Raises:
            CheckpointError: as in `claim`.
        """
        self.claim()
        folder = self.checkpoint_dir / f"tmp_step_{step}"
        if os.path.lexists(folder):
            _remove(folder)
        folder.mkdir()
        (folder / _INFO_FILE).write_text(_as_json(self.run_info | dict(training_info)))
        if run_config is not None:
            text = yaml.safe_dump(public_values(run_config), sort_keys=False)
            (folder / _CONFIG_FILE).write_text(text)
        return folder

    def add_to_training_info(self, checkpoint_path: PathLike, values: Mapping[str, Any]) -> None:
        """Add values to the training info of a checkpoint, complete or not, unless the checkpoint was removed.

        Raises:
            CheckpointError: the training info could not be read or written; the checkpoint is unchanged.
        """
        folder = Path(checkpoint_path)
        if not folder.exists():
            return
        info = self.load_training_info(folder) or {}
        try:
            replace_file(folder, _INFO_FILE, _as_json(info | dict(values)))
        except OSError as error:
            raise CheckpointError(f"{folder / _INFO_FILE} could not be written: {error}.") from error

    def finalize_checkpoint(self, checkpoint_path: PathLike) -> None:
        """Flush a filled folder to disk, rename it to its step's checkpoint, and remove checkpoints no longer kept.

        A failure after the renaming is only a warning, because the checkpoint is complete then.

        Raises:
            CheckpointError: the folder was not made by `init_tmp_checkpoint`.
        """
        folder = Path(checkpoint_path)
        if not folder.name.startswith("tmp_step_") or not (folder / _INFO_FILE).exists():
            raise CheckpointError(f"{folder} is not a folder made by init_tmp_checkpoint.")
        write_manifest(folder)
        flush_tree(folder)
        final = folder.with_name(folder.name.removeprefix("tmp_"))
        old = folder.with_name(f"old_{final.name}")
        if final.exists():
            os.replace(final, old)
        os.replace(folder, final)
        try:
            flush_folder(self.checkpoint_dir)
            if os.path.lexists(old):
                _remove(old)
            self.remove_old_checkpoints()
            self._write_status(int(final.name.removeprefix("step_")))
        except OSError as error:
            logger.warning("%s is complete, but cleaning up after it failed: %s.", final, error)
        self.expected_bytes = manifest_bytes(final)

    def _write_status(self, step: int) -> None:
        saved_at = (self.checkpoint_dir / f"step_{step}").stat().st_mtime
        status = {"last_successful_ckpt_save_completion": saved_at, "last_checkpoint_step": step}
        write_atomically(self.checkpoint_dir / _STATUS_FILE, json.dumps(status))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        if not self.checkpoint_dir.exists():
            return []
        found = (_STEP.match(entry.name) for entry in self.checkpoint_dir.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def get_latest_checkpoint_path(self) -> str | None:
        """Return the newest checkpoint's folder, or None."""
        steps = self.steps()
        return str(self.checkpoint_dir / f"step_{steps[-1]}") if steps else None

    def get_best_checkpoint_path(self) -> str | None:
        """Return the checkpoint with the best metric, or the newest one if no metric ranks them, or None."""
        ranking = self._ranking()
        return str(self.checkpoint_dir / f"step_{ranking[0]}") if ranking else None

    def load_training_info(self, checkpoint_path: PathLike | None = None) -> dict[str, Any] | None:
        """Load the training info that `init_tmp_checkpoint` stored, by default of the newest checkpoint.

        Raises:
            CheckpointError: the folder holds no readable save state.
        """
        path = checkpoint_path or self.get_latest_checkpoint_path()
        if path is None:
            return None
        try:
            info = json.loads(read_text(Path(path) / _INFO_FILE))
            if not isinstance(info, dict):
                raise ValueError(f"holds a {type(info).__name__}")
            return info
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} has no readable {_INFO_FILE} ({error}), so it is not a checkpoint of this library. "
                "Move it away or choose another checkpointing.checkpoint_dir."
            ) from error

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Remove all checkpoints except the `keep_top_k` best and, with `exclude_latest`, the newest one.

        A checkpoint with an unreadable save state is neither ranked nor removed.
        """
        if self._keep_top_k is None:
            return
        kept = set(self._ranking()[: self._keep_top_k]) | self._unreadable
        steps = self.steps()
        if exclude_latest and steps:
            kept.add(steps[-1])
        for step in steps:
            if step not in kept:
                doomed = self.checkpoint_dir / f"tmp_step_{step}"
                os.replace(self.checkpoint_dir / f"step_{step}", doomed)
                _remove(doomed)

    def _ranking(self) -> list[int]:
        """Rank the steps from best to worst: steps without the metric last, newer steps first among equals."""
        steps = self.steps()
        if self._metric_name is None:
            return steps[::-1]
        values = {step: self._metric_of(step) for step in steps}
        steps = [step for step in steps if step not in self._unreadable]
        chooses = self._keep_top_k is not None and len(steps) > self._keep_top_k
        is_new = self._metric_is_chosen and not self._warned_of_metric  # a run without validation has no such metric
        if is_new and chooses and all(values[step] is None for step in steps):
            self._warned_of_metric = True
            logger.warning(
                "No checkpoint has the metric %s of checkpointing.metric_name; keeping the newest ones.",
                self._metric_name,
            )
        sign = 1 if self._higher_is_better else -1

        def key(step: int) -> tuple[bool, float, int]:
            value = values[step]
            return (value is not None, sign * value if value is not None else 0.0, step)

        return sorted(steps, key=key, reverse=True)

    def _metric_of(self, step: int) -> float | None:
        """Return the ranking metric of a checkpoint, or None if it is absent, unreadable or not a finite number."""
        try:
            info = self.load_training_info(self.checkpoint_dir / f"step_{step}") or {}
        except CheckpointError as error:
            if step not in self._unreadable:
                logger.warning("step_%d is ignored by keep_top_k and not removed: %s", step, error)
            self._unreadable.add(step)
            return None
        self._unreadable.discard(step)
        value = info.get(str(self._metric_name))
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _as_json(info: Mapping[str, Any]) -> str:
    return json.dumps(dict(info), indent=1, default=lambda number: number.item())


def _wrong_count(info: Mapping[str, Any]) -> str | None:
    """Describe a wrong number in the save state, or return None if all are valid."""
    for name in _COUNTS:
        value = info.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return f"{_INFO_FILE} holds {name}={value!r}, which is not a number of steps, samples or tokens"
    return None


def _remove(path: Path) -> None:
    """Remove a folder with its contents, or only the link if it is a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def flush_tree(folder: Path) -> None:
    """Flush every file below a folder to disk, before the folder is renamed."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open_regular(os.path.join(root, name)) as file:
                os.fsync(file.fileno())
        flush_folder(Path(root))


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointWrite:
    """Context manager that rewords a failure to write one checkpoint, and passes other errors unchanged."""

    def __init__(self, checkpoints: CheckpointManager, step: int):
        self._checkpoints = checkpoints
        self._step = step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise an error with path and size if the write failed.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        of_the_run = isinstance(error, NemoRLError) and not isinstance(error, CheckpointError)
        if not isinstance(error, Exception) or of_the_run:
            return
        full = is_disk_full(error, free_bytes(self._checkpoints.checkpoint_dir))
        if full or isinstance(error, OSError | CheckpointError):
            raise self._explained("no space left on device" if full else str(error)) from error

    def _explained(self, reason: str) -> CheckpointError:
        folder, expected = self._checkpoints.checkpoint_dir, self._checkpoints.expected_bytes
        _remove_partial(folder / f"tmp_step_{self._step}")
        free = f"{readable_bytes(free_bytes(folder))} are free"
        bytes_ = free if expected is None else f"a checkpoint takes {readable_bytes(expected)}, {free}"
        steps = self._checkpoints.steps()
        kept = f"step_{steps[-1]} is complete and stays" if steps else "there is no older checkpoint"
        return CheckpointError(
            f"step_{self._step} could not be written to {folder}: {reason} ({bytes_}). The partial folder is removed; "
            f"{kept}."
        )


def _remove_partial(folder: Path) -> None:
    """Remove a folder, and free also the bytes of files that a failed writer still holds open."""
    for file in folder.rglob("*"):
        if file.is_file():
            with suppress(OSError):
                os.truncate(file, 0)
    shutil.rmtree(folder, ignore_errors=True)
