"""Set up logging of a driver process on the console and in a file, with the level `NRL_LOG_LEVEL` for its records.

The main program calls `configure_logging` once. Only the file gets the text of `extra={"details": text}`, such as a
table. Invariant: records appear above a live progress bar, because the handler looks up `sys.stderr` for each record.
"""

import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nemo_rl.files.writing import OptionalOutput
from nemo_rl.utils.errors import ConfigError

LOG_LEVEL_VARIABLE = "NRL_LOG_LEVEL"
WIDTH = 160
"""Maximum length of a console line in characters, which also keeps log files readable."""
_INDENT = 11
"""Indent of continued lines: width of the time and the level."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours and cursor movements in the messages of Ray and other libraries."""
_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
RUN_LOG_FILE = "run.log"
"""File of a run's folder with the lines of the console, and with details that the console lacks."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.Handler):
    """Handler that writes to the current `sys.stderr`, which a progress bar replaces while it is live."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            lines = self.format(record).splitlines() or [""]
            self.stream.write("".join(f"{part}\n" for line in lines for part in wrapped(_ESCAPES.sub("", line))))
            self.stream.flush()
        except (OSError, ValueError):
            self.handleError(record)


def with_details(text: str, record: logging.LogRecord) -> str:
    """Append the details of a record, if it has any, to its text."""
    details = getattr(record, "details", None)
    return text if details is None else f"{text}\n{details}"


class _RunLog(logging.FileHandler):
    """Handler that writes to the run's file. If writing fails, the handler warns once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._output = OptionalOutput(str(path))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record with its details."""
        return with_details(_ESCAPES.sub("", super().format(record)), record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with self._output.attempt():
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()


@contextmanager
def log_to(folder: Path) -> Iterator[None]:
    """Write nemo_rl's records with their details also to `run.log` in the folder of a run."""
    library, handler = logging.getLogger("nemo_rl"), _RunLog(folder / RUN_LOG_FILE)
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)
        handler.close()


def _open_outputs() -> None:
    """Open the null device as standard output or error if the program was started without them.

    Python sets missing ones to None, and the next opened files would get their descriptors.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_WRONLY)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))


def wrapped(line: str, width: int = WIDTH) -> list[str]:
    """Wrap a line between words at `width` characters, with continued lines indented and longer words not cut."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def show_messages() -> None:
    """Show nemo_rl's records as `configure_logging` does, unless the program has configured logging itself."""
    library = logging.getLogger("nemo_rl")
    if not logging.getLogger().handlers and not library.handlers and library.level == logging.NOTSET:
        configure_logging()


def configure_logging() -> None:
    """Show nemo_rl's records at NRL_LOG_LEVEL (INFO) and other libraries' warnings, on stderr.

    Raises:
        ConfigError: NRL_LOG_LEVEL is not a log level.
    """
    _open_outputs()
    level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE}={level} is not a log level; choose one of {', '.join(_LEVELS)}.")
    handler = _StderrHandler()
    logging.basicConfig(
        level=logging.WARNING,
        handlers=[handler],
        format=_FORMAT,
        datefmt="%H:%M:%S",
    )
    logging.getLogger("nemo_rl").setLevel(level)
