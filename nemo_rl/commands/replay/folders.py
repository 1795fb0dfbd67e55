"""Find the records of a run. The module imports little, so that errors appear immediately."""

import re
from pathlib import Path

from nemo_rl.config.schema.logger import RECORDS_FOLDER
from nemo_rl.utils.errors import ReplayError

_NAME = re.compile(r"step_(\d+)\.json")


def find_folder(run: Path, step: int) -> Path:
    """Return the folder of a run in which a step was recorded: `exp_NNN` itself, or the newest `exp_NNN` inside it.

    If none has it, return the newest folder that has any record.

    Raises:
        ReplayError: no folder has a record.
    """
    below = sorted(run.glob("exp_*"), key=lambda path: (len(path.name), path.name), reverse=True)
    found = {folder: recorded_steps(folder) for folder in (run, *below)}
    with_records = [folder for folder, steps in found.items() if steps]
    if not with_records:
        raise ReplayError(
            f"{run} has no recorded steps: neither it nor an exp_* in it has records in a folder {RECORDS_FOLDER}. "
            "Give the logger.log_dir of a run with logger.record_steps=true; steps of other runs cannot be repeated."
        )
    return next((folder for folder in with_records if step in found[folder]), with_records[0]).resolve()


def recorded_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that have a record in a folder `exp_NNN`, in order."""
    names = (_NAME.fullmatch(path.name) for path in (folder / RECORDS_FOLDER).glob("*"))
    return sorted(int(name[1]) for name in names if name)
