"""Write the page of runs to a file."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import nemo_rl
from nemo_rl.commands.report.page import make_page
from nemo_rl.commands.report.run_files import find_run
from nemo_rl.commands.report.run_view import RunView
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "report.html"
_MOST_LISTED = 10_000
"""Largest number of samples of a run in the list of the file; they take about 2 MB."""


def write_report(folders: Sequence[Path], output: Path | None, num_samples: int) -> Path:
    """Write the report of runs and return its path.

    Args:
        folders: log folders of the runs.
        output: the file; None: `report.html` in the folder of the first run.
        num_samples: number of samples of each run with conversation and tokens.

    Raises:
        DataError: a folder has no run.
        ConfigError: the file cannot be written, or the number is negative.
    """
    if num_samples < 0:
        raise ConfigError(f"--samples={num_samples} must not be negative.")
    found = [find_run(folder) for folder in folders]
    views = [RunView(run) for run in found]
    runs = []
    for view in views:
        view.read()
        runs.append(view.as_json() | {"samples": view.samples_as_json(_MOST_LISTED, num_samples)})
    path = output or found[0].folder / FILE
    page = make_page({"runs": runs, "live": False, "version": nemo_rl.__version__, "written": time.time()})
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file with --output.") from error
    logger.info("Report: %s (%.1f MB)", path, len(page) / 1e6)
    return path
