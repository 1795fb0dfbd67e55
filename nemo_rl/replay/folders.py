"""Find the records of a run. It imports little, so that errors appear immediately."""

from pathlib import Path

from nemo_rl.config.schema.logger import RECORDS_FOLDER
from nemo_rl.utils.errors import ReplayError


def find_folder(run: Path) -> Path:
    """Return the folder of a run that has records: `exp_NNN` itself, or the newest one below.

    Raises:
        ReplayError: there is none.
    """
    if (run / RECORDS_FOLDER).is_dir():
        return run.resolve()
    found = sorted(run.glob(f"exp_*/{RECORDS_FOLDER}"), key=lambda path: (len(path.parent.name), path.parent.name))
    if not found:
        raise ReplayError(
            f"{run} has no recorded steps: neither it nor an exp_* in it has a folder {RECORDS_FOLDER}. Give the "
            "logger.log_dir of a run with logger.record_steps=true; steps of other runs cannot be repeated."
        )
    return found[-1].parent.resolve()
