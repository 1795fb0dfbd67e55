"""Read the samples that a run has stored (`experience.trajectory_log`)."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from nemo_rl.files.regular_file import open_regular
from nemo_rl.utils.errors import DataError

_NAME = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
_PHASES = {"train": "train", "val": "validation"}


@dataclass(frozen=True)
class StoredSample:
    """One line of a file of samples."""

    file: Path
    line: int
    """Number of the line, from 1."""
    phase: str
    """Phase of the run: "train" or "validation"."""
    row: Mapping[str, Any]
    """Content of the line."""

    @property
    def reward(self) -> float | None:
        """The stored reward, or None if there was none."""
        reward: float | None = self.row["rewards"]
        return reward

    @property
    def place(self) -> str:
        """File and line of the sample, for people."""
        return f"{self.file.name}:{self.line}"


def sample_files(folder: Path, only: str | None = None) -> list[Path]:
    """Return the files of samples, in the order of phases and steps.

    Args:
        folder: the log folder of a run, of which the newest `exp_*` is read, or one of its files.
        only: "train" or "validation", or None for both.

    Raises:
        DataError: there are no such files.
    """
    if folder.exists() and not folder.is_dir():
        return [folder]
    runs = sorted((run for run in folder.glob("exp_*") if run.is_dir()), key=lambda run: run.name)
    named = [(file, _NAME.fullmatch(file.name)) for file in (runs[-1] if runs else folder).glob("*_data_step*.jsonl")]
    found = sorted(
        (_PHASES[name[1]], int(name[2]), file) for file, name in named if name and only in (None, _PHASES[name[1]])
    )
    if not found:
        raise DataError(
            f"{folder} has no samples{f' of {only}' if only else ''}: no {'train' if only != 'validation' else 'val'}"
            "_data_step<N>.jsonl. Give the logger.log_dir of a run with logger.save_trajectories=true."
        )
    return [file for _, _, file in found]


def _opened(file: Path) -> TextIO:
    """Open a file of samples."""
    try:
        return TextIOWrapper(open_regular(file), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read. {error.strerror}.") from error


def read_samples(file: Path) -> Iterator[StoredSample]:
    """Yield the samples of a file, and only the first (`branch` 0) of a sample with several conversations.

    Raises:
        DataError: a line is not a stored sample.
    """
    name = _NAME.fullmatch(file.name)
    phase = _PHASES[name[1]] if name else "train"
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                missing = {"idx", "task_name", "content", "rewards"} - row.keys()
            except (ValueError, AttributeError) as error:
                raise DataError(f"{file}:{number} is no JSON object: {error}") from error
            if missing:
                raise DataError(f"{file}:{number} is no stored sample: it lacks {', '.join(sorted(missing))}.")
            if not row.get("branch"):
                yield StoredSample(file, number, phase, row)
