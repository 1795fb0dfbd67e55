"""Describe the end of a run, and where it failed: worker, phase and line of the user's own code.

Invariant: only the run's record and its traceback are read, so the state can be found out after the run.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.algorithms.setup.run_record import TRACEBACK_FILE
from nemo_rl.commands.report.run_files import RunFiles
from nemo_rl.files.regular_file import read_text

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n(?P<source>(?!\s*File ).*)$', re.M
)
_WORKER = re.compile(r"\b[Ww]orker (?P<worker>[\w.-]+ \([^()]*\))")
_PHASE = re.compile(r"\bduring '(?P<phase>[^']+)'")
_NOT_OWN = re.compile(
    r"(^|/)(nemo_rl|site-packages|dist-packages|lib/python3[^/]*|examples/run_\w+\.py|pytest)(/|$)|^<"
)


class Frame(NamedTuple):
    """Line of a program in a traceback."""

    place: str
    """File, line and function."""
    source: str
    """Text of the line, or "" if the traceback does not have it."""


def state_of(run: RunFiles) -> dict[str, Any]:
    """Return the end of a run from its record, `where` it failed, and the `earlier` parts that it continued."""
    record = run.record()
    state = {name: record.get(name) for name in ("status", "started", "ended", "error", "host", "version")}
    command = record.get("command")
    state["command"] = [str(word) for word in command] if isinstance(command, list) else []
    if record.get("status") == "failed":
        state["where"] = where_it_failed(run.folder, str(record.get("error")))
    return state | {"earlier": [_part(part) for part in run.earlier]}


def _part(part: RunFiles) -> dict[str, Any]:
    """Return the end of a part of a run that a later part continued."""
    record = part.record()
    return {"name": part.folder.name, **{name: record.get(name) for name in ("status", "started", "ended")}}


def where_it_failed(folder: Path, error: str) -> dict[str, str]:
    """Return what is known of `worker`, `phase`, `place` and `source`.

    Args:
        folder: the run's folder, which has the traceback.
        error: the error's message.
    """
    try:
        trace = read_text(folder / TRACEBACK_FILE)
    except (OSError, UnicodeError):
        trace = ""
    found: dict[str, str] = {}
    for pattern in (_WORKER, _PHASE):
        match = pattern.search(error) or pattern.search(trace)
        found |= match.groupdict() if match else {}
    frame = own_frame(trace)
    return found | (frame._asdict() if frame else {})


def own_frame(trace: str) -> Frame | None:
    """Return the last line of the user's own code in a traceback, or None if it has only lines of libraries."""
    own = [match for match in _FRAME.finditer(trace) if not _NOT_OWN.search(match["file"])]
    if not own:
        return None
    last = own[-1]
    return Frame(f"{last['file']}:{last['line']} in {last['function']}", last["source"].strip())
