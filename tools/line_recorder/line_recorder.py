"""Record which tests execute which lines, in the process of pytest and in every process that a test starts.

    tools/mutants.py record ─► environment: LINES (a JSON file), HITS (a folder); a .pth file in site-packages
                                  │
             every Python process ─► `start` ─► HITS/lines-PID: time, xdist worker, line
             pytest, as a plugin  ──────────► HITS/tests-PID: time, xdist worker, test function

`tools/mutants.py` joins both by the xdist worker and the time: a process that Ray starts has the environment of the
test that started Ray, which may have ended long ago.

The events of a line are turned off after the first one, until the next test function begins, so that recording costs
almost nothing.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

LINES, HITS, WORKER = "NEMO_RL_RECORDED_LINES", "NEMO_RL_RECORDED_HITS", "NEMO_RL_RECORDED_WORKER"
_TOOL = 4
"""Number of the tool in `sys.monitoring`; 0 to 3 and 5 are those of debuggers, coverage and profilers."""


def start() -> None:
    """Record the lines that `NEMO_RL_RECORDED_LINES` lists, in this process and those that it forks."""
    if LINES not in os.environ or sys.monitoring.get_tool(_TOOL) is not None:  # Python may read a .pth file twice
        return
    wanted: dict[str, set[int]] = {
        file: set(lines) for file, lines in json.loads(Path(os.environ[LINES]).read_text()).items()
    }
    monitoring = sys.monitoring

    def line(code: CodeType, number: int) -> object:
        file = code.co_filename[code.co_filename.rfind("/nemo_rl/") + 1 :]
        if number in wanted.get(file, ()):
            _write("lines", f"{file}:{number}")
        return monitoring.DISABLE

    monitoring.use_tool_id(_TOOL, "line_recorder")
    monitoring.register_callback(_TOOL, monitoring.events.LINE, line)
    monitoring.set_events(_TOOL, monitoring.events.LINE)


def _write(kind: str, what: str) -> None:
    """Append a record; a file for each process, and nothing that has to be written at its end."""
    worker = os.environ.get(WORKER, "main")
    record = f"{time.time():.4f} {worker} {what}\n"
    with open(f"{os.environ[HITS]}/{kind}-{os.getpid()}", "a") as file:
        file.write(record)


class _Tests:
    """Plugin that records the times of test functions."""

    def __init__(self) -> None:
        self._running = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the begin of a test function, and turn events of lines on again."""
        if (name := nodeid.split("[")[0]) != self._running:
            self._running = name
            _write("tests", name)
            sys.monitoring.restart_events()

    def pytest_sessionfinish(self) -> None:
        """Record the end of the last test."""
        _write("tests", "")


def pytest_configure(config: Any) -> None:
    """Record tests in the processes that run them."""
    # Tests start programs without the variables of pytest.
    os.environ[WORKER] = os.environ.get("PYTEST_XDIST_WORKER", "main")
    if LINES in os.environ and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(_Tests(), "recorded tests")


def functions_by_line(hits: Path) -> dict[str, set[str]]:
    """Return for each line, as `file:number`, the test functions (`file::function`) that executed it."""
    starts: dict[str, list[tuple[float, str]]] = {}
    for when, worker, name in _records(hits, "tests"):
        starts.setdefault(worker, []).append((when, name))
    for tests in starts.values():
        tests.sort()
    found: dict[str, set[str]] = {}
    for when, worker, line in _records(hits, "lines"):
        running = [name for began, name in starts.get(worker, ()) if began <= when]
        if running and running[-1]:
            found.setdefault(line, set()).add(running[-1])
    return found


def _records(hits: Path, kind: str) -> Iterator[tuple[float, str, str]]:
    for path in hits.glob(f"{kind}-*"):
        for record in path.read_text().splitlines():
            when, worker, *rest = record.split(" ", 2)
            yield float(when), worker, rest[0] if rest else ""
