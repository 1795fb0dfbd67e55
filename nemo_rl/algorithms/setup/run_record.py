"""Record the start and the end of a run in its log folder.

`run.json` has `command`, `version`, `host`, `pid`, `started` and `status`. The status is "running", and at the end
"finished", "interrupted" or "failed", with `ended` and the `error`. If a run is killed, the status stays "running",
with the `pid` of a process that does not exist.
"""

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import nemo_rl
from nemo_rl.config import MasterConfig, public_text
from nemo_rl.files.writing import OptionalOutput, write_atomically
from nemo_rl.utils.errors import RunInterruptedError

RECORD_FILE = "run.json"
_MAX_ERROR_CHARS = 2000
TRACEBACK_FILE = "traceback.txt"
"""File in a run's folder with the traceback of the error that ended it, including tracebacks of workers."""


type EndOfRun = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]


def record_run(log_dir: Path, config: MasterConfig, resources: ExitStack) -> EndOfRun:
    """Write the record of a run at its start, and add its end when `resources` are closed.

    Args:
        log_dir: the run's folder.
        config: the configuration, whose secrets are left out of the command.
        resources: closed at the end of the run, with the exception that ends it.

    Returns:
        Function that adds the end. Push it on `resources` last, so that it gets the exception of the run
        before anything is shut down. Calls after the first have no effect.
    """
    record: dict[str, Any] = {
        "command": [public_text(argument, config) for argument in sys.argv],
        "version": nemo_rl.__version__,
        "host": platform.node(),
        "pid": os.getpid(),
        "pid_started": start_of_process(os.getpid()),
        "started": time.time(),
        "status": "running",
    }
    output = OptionalOutput(f"The record of the run in {log_dir}")

    def write() -> None:
        with output.attempt():
            write_atomically(log_dir / RECORD_FILE, [json.dumps(record, indent=1) + "\n"])

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if "ended" in record:
            return
        record.update(ended=time.time(), **{key: public_text(text, config) for key, text in _outcome(error).items()})
        write()
        if error is not None and record["status"] == "failed":
            with output.attempt():
                write_atomically(log_dir / TRACEBACK_FILE, traceback.format_exception(error))
                error.add_note(f"The whole traceback is in {log_dir / TRACEBACK_FILE}.")

    write()
    resources.push(end)
    return end


def start_of_process(pid: int) -> int | None:
    """Return the start time of a process in ticks since the machine's start, or None if it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _outcome(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {"status": "finished"}
    is_stopped = isinstance(error, RunInterruptedError | KeyboardInterrupt | SystemExit)
    text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    return {"status": "interrupted" if is_stopped else "failed", "error": text}
