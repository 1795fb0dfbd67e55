"""Handle a failed write of a checkpoint: remove the partial folder and raise an error with path and bytes.

It wraps the calls of `utils.checkpoint` that write one checkpoint. Invariant: whatever fails, all checkpoints that were
complete before are kept.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl.host.disk_space import free_bytes, is_disk_full, readable_bytes
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError, NemoRLError


class CheckpointWrite:
    """Context that rewords a failure while one checkpoint is written; other errors pass unchanged."""

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
        """Name path and bytes of a failed write.

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
        _remove(folder / f"tmp_step_{self._step}")
        free = f"{readable_bytes(free_bytes(folder))} are free"
        bytes_ = free if expected is None else f"a checkpoint takes {readable_bytes(expected)}, {free}"
        steps = self._checkpoints.steps()
        kept = f"step_{steps[-1]} is complete and stays" if steps else "there is no older checkpoint"
        return CheckpointError(
            f"step_{self._step} could not be written to {folder}: {reason} ({bytes_}). The partial folder is removed; "
            f"{kept}."
        )


def _remove(folder: Path) -> None:
    """Remove a folder and free its bytes, also of files that a failed writer still holds open."""
    for file in folder.rglob("*"):
        if file.is_file():
            with suppress(OSError):
                os.truncate(file, 0)
    shutil.rmtree(folder, ignore_errors=True)
