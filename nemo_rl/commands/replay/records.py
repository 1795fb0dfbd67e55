"""Read the records of steps that a run has written (`algorithms.runtime.step_record`)."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_rl.algorithms.runtime.step_record import FORMAT, write_json
from nemo_rl.commands.replay.folders import recorded_steps
from nemo_rl.config.schema.logger import RECORDS_FOLDER
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.files.regular_file import read_text
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.policy.update_records import UpdateRecord
from nemo_rl.utils.errors import DataError, ReplayError

_NEEDED = ("weight_version", "checkpoint", "loss_fn", "config", "samples", "environment", "code", "layout", "updates")


@dataclass(frozen=True)
class Step:
    """Recorded or repeated step, for a comparison."""

    summary: Mapping[str, Any]
    """`config`, `samples`, `environment`, `code`, `layout`, as in the JSON file."""
    tensors: Mapping[str, Tensor]
    """Values that the stages computed, each `[B, T]` or `[B]`."""
    updates: list[UpdateRecord]
    """The optimizer updates."""


@dataclass(frozen=True)
class RecordedStep(Step):
    """A step of a run."""

    file: Path
    """The JSON file."""
    trajectories: list[Trajectory]
    """The rollouts of the step."""


def read_step(folder: Path, step: int) -> RecordedStep:
    """Read the record of a step.

    Args:
        folder: log folder of the run, `exp_NNN`.

    Raises:
        ReplayError: the step was not recorded, or its record cannot be read.
        CheckpointError: the rollouts cannot be read.
    """
    file = folder / RECORDS_FOLDER / f"step_{step}.json"
    recorded = recorded_steps(folder)
    if step not in recorded:
        raise ReplayError(
            f"step {step} was not recorded. A run records its first step and each step after a checkpoint; {folder} "
            f"has {', '.join(map(str, recorded)) or 'none'}. Choose one of them."
        )
    with _damage_told(file):
        summary = json.loads(read_text(file))
        written_as = summary["format"]
    if written_as != FORMAT:
        raise ReplayError(
            f"{file} has format {written_as}, and this version of nemo_rl reads format {FORMAT}. Use the version that "
            f"wrote it: {summary.get('environment', {}).get('nemo_rl', 'unknown')}."
        )
    stored = load_plain(file.with_suffix(".pt"))
    with _damage_told(file):
        absent = [name for name in _NEEDED if name not in summary]
        if absent:
            raise KeyError(", ".join(absent))
        return RecordedStep(
            summary,
            dict(stored["tensors"]),
            [
                UpdateRecord.from_json(values, logprobs)
                for values, logprobs in zip(summary["updates"], stored["logprobs"], strict=True)
            ],
            file,
            [Trajectory.from_state(state) for state in stored["trajectories"]],
        )


@contextmanager
def _damage_told(file: Path) -> Iterator[None]:
    """Name the file in errors about the content of a record."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DataError) as error:
        raise ReplayError(
            f"{file} is damaged, or another version wrote it: {type(error).__name__}: {error}. Record the step again."
        ) from error


def add_modules(recorded: RecordedStep, repeated: Step) -> None:
    """Add the outputs of modules to a record, from a repetition that is equal to it."""
    updates = [
        replace(update, modules=again.modules) for update, again in zip(recorded.updates, repeated.updates, strict=True)
    ]
    write_json(recorded.file, {**recorded.summary, "updates": [update.as_json() for update in updates]})
