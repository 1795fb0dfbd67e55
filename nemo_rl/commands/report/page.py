"""Build the page: one HTML file that needs no other file.

Invariant: the data is JSON without any `<`, and the content security policy allows only the page's own scripts.
"""

import base64
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import nemo_rl
from nemo_rl.commands.report.images import PageImages
from nemo_rl.commands.report.run_files import find_runs
from nemo_rl.commands.report.run_view import RunView
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import ConfigError

_SCRIPTS = (
    "uPlot.iife.min.js",
    "elements.js",
    "lines.js",
    "charts.js",
    "runs.js",
    "samples.js",
    "tokens.js",
    "rollouts.js",
    "curves.js",
    "address.js",
    "page.js",
)
_STYLES = ("uPlot.min.css", "page.css")


def _tell_apart(runs: Sequence[dict[str, Any]]) -> None:
    """Make the names of runs different, by adding as many parent folders as needed to equal names."""
    for count in range(3, 7):
        seen = Counter(run["name"] for run in runs)
        for run in runs:
            if seen[run["name"]] > 1:
                run["name"] = "/".join(Path(run["folder"]).parts[-count:])


def make_page(data: Mapping[str, Any]) -> str:
    """Return the HTML of a page.

    Args:
        data: `runs`, each as `RunView.as_json` returns it, perhaps with `samples`; `live`, whether a server answers
            requests of the page; `version` and `written`; perhaps `images`, the addresses of pictures by digest.
    """
    scripts = "\n".join(map(_asset, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {"'self'" if data.get('live') else "'none'"}; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLES": "\n".join(map(_asset, _STYLES)), "DATA": as_json(data), "SCRIPTS": scripts}
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _asset("page.html"))


def as_json(data: Any) -> str:
    """Format data as JSON that may be inserted into HTML."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return files("nemo_rl.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


logger = logging.getLogger(__name__)

FILE = "report.html"
_SAMPLES, _SAMPLES_OF_ALL = 256, 1024
"""Default numbers of samples with conversation and tokens, of a run and of all runs together."""
_MOST_LISTED = 10_000
"""Largest number of samples of a run in the list of the file; they take about 2 MB."""
_MOST_LISTED_OF_ALL = 40_000
"""Largest number of samples of all runs together in the lists."""


def write_report(folders: Sequence[Path], output: Path | None, num_samples: int | None) -> Path:
    """Write the report of runs and return its path.

    Args:
        folders: log folders of the runs, as for `find_runs`.
        output: the file, or None for `report.html` in the first folder.
        num_samples: number of samples of each run with conversation and tokens, or None for the default of the command.

    Raises:
        DataError: a folder has no run.
        ConfigError: the file cannot be written, or the number is negative.
    """
    if num_samples is not None and num_samples < 0:
        raise ConfigError(f"--samples={num_samples} must not be negative.")
    found = {run.folder: run for folder in folders for run in find_runs(folder)}
    listed = min(_MOST_LISTED, _MOST_LISTED_OF_ALL // len(found))
    if num_samples is None:
        num_samples = min(_SAMPLES, _SAMPLES_OF_ALL // len(found))
    runs, images = [], PageImages()
    for run in found.values():
        view = RunView(run)
        view.read()
        runs.append(view.as_json() | {"samples": view.samples_as_json(listed, num_samples, images)})
    _tell_apart(runs)
    path = output or folders[0] / FILE
    about = {"live": False, "version": nemo_rl.__version__, "written": time.time()}
    page = make_page({"runs": runs, **about, **({"images": images.addresses} if images.addresses else {})})
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file with --output.") from error
    logger.info("Report: %s (%.1f MB)", path, len(page) / 1e6)
    return path
