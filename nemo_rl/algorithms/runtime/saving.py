"""Save the checkpoints of a run: make a folder, let each model write into it, and rename it when it is complete.

With `checkpointing.is_async`, a model returns when it has copied its state, and writes the copy while training
continues. Invariants: at most one checkpoint is unfinished. A failure in the background is raised at the next step, the
next save or the end of the run, whichever comes first.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel

from nemo_rl.algorithms.runtime.resume_check import DATA_POSITION_FILE
from nemo_rl.config import CheckpointingConfig
from nemo_rl.utils.checkpoint import CheckpointManager, CheckpointWrite


class Savable(Protocol):
    """Interface of a model that can be stored."""

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, tokenizer_path: str | None, consolidated: bool
    ) -> None:
        """Write weights, optimizer and tokenizer and, with `consolidated`, the model in Hugging Face's format."""


class BackgroundSavable(Savable, Protocol):
    """Interface of a model that can write a checkpoint while it is trained."""

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None,
        tokenizer_path: str | None,
        consolidated: bool,
        *,
        background: bool = False,
    ) -> None:
        """Write as `Savable` does. With `background`, return when the data is copied, and write the copy later."""

    def checkpoint_is_written(self) -> bool:
        """Return whether all background writes have ended."""

    def finalize_async_save(self) -> None:
        """Wait until everything is written. Raise the error of a failed write."""


class CheckpointSaver:
    """Write the checkpoints of a run.

    Args:
        models: Models to save, each into the folder of its name.
        run_config: Configuration that is stored in every checkpoint.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        config: CheckpointingConfig,
        models: Mapping[str, Savable | BackgroundSavable],
        run_config: BaseModel,
    ):
        self._checkpoints = checkpoints
        self._config = config
        self._models: Mapping[str, Any] = models
        self._run_config = run_config
        self._unfinished: tuple[int, Path] | None = None
        self.saved_step = 0
        """The last step that has a complete checkpoint."""

    def save(self, step: int, info: Mapping[str, Any], position: Mapping[str, Any]) -> None:
        """Save a checkpoint of a step, after the previous checkpoint is written.

        Args:
            info: content of `training_info.json`.

        Raises:
            CheckpointError: this checkpoint or the one before it could not be written.
        """
        self.settle()
        with CheckpointWrite(self._checkpoints, step):
            folder = Path(self._checkpoints.init_tmp_checkpoint(step, info, self._run_config))
            background = {"background": True} if self._config.is_async else {}
            for name, model in self._models.items():
                model.save_checkpoint(
                    str(folder / name / "weights"),
                    str(folder / name / "optimizer") if self._config.save_optimizer else None,
                    str(folder / name / "tokenizer"),
                    self._config.save_consolidated,
                    **background,
                )
            torch.save(position, folder / DATA_POSITION_FILE)
        self._unfinished = (step, folder)
        if not self._config.is_async:
            self.settle()

    def add_to_info(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the `training_info.json` of a step if this run has saved the step.

        Raises:
            CheckpointError: The file could not be written. The checkpoint stays as it was.
        """
        if self._unfinished is not None and self._unfinished[0] == step:
            self._checkpoints.add_to_training_info(self._unfinished[1], values)
        elif self.saved_step == step:
            self._checkpoints.add_to_training_info(self._checkpoints.checkpoint_dir / f"step_{step}", values)

    def settle(self, *, wait: bool = True) -> None:
        """Complete the unfinished checkpoint, if there is one. Without `wait`, skip one that is still being written.

        Raises:
            CheckpointError: The checkpoint could not be written. Its folder is removed.
        """
        if self._unfinished is None:
            return
        if not wait and not all(model.checkpoint_is_written() for model in self._models.values()):
            return
        (step, folder), self._unfinished = self._unfinished, None
        with CheckpointWrite(self._checkpoints, step):
            if self._config.is_async:
                for model in self._models.values():
                    model.finalize_async_save()
            self._checkpoints.finalize_checkpoint(folder)
        self.saved_step = step
