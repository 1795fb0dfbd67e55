"""Set up console logging of a driver process, with the level `NRL_LOG_LEVEL` for nemo_rl's records.

The main program calls it once. Invariant: records appear above a live progress bar, because the handler looks up
`sys.stderr` for each record.
"""

import logging
import os
import re
import sys
import textwrap
from typing import TextIO

from nemo_rl.utils.errors import ConfigError

LOG_LEVEL_VARIABLE = "NRL_LOG_LEVEL"
WIDTH = 160
"""Maximum length of a console line in characters, so that log files are readable too."""
_INDENT = 11
"""Indent of continued lines: width of time and level."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours and cursor movements in the messages of Ray and other libraries."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`: a progress bar replaces it while it is live."""

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


def _open_outputs() -> None:
    """Open the null device as standard output or error if the program was started without them.

    Python sets them to None then, and the next opened files would get their descriptors.
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
    """Wrap a line between words at `width` characters, with continued lines indented and longer words uncut."""
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
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("nemo_rl").setLevel(level)
