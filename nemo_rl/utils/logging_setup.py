"""Console logging of a driver process; `NRL_LOG_LEVEL` sets the level of nemo_rl's own records.

Called once, by the program that runs. Invariant: records pass above a live progress bar, because the handler looks up
`sys.stderr` for each record.
"""

import logging
import os
import sys
from typing import TextIO

from nemo_rl.utils.errors import ConfigError

LOG_LEVEL_VARIABLE = "NRL_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is now: a progress bar replaces it while it is live."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            self.stream.write(self.format(record) + "\n")
            self.stream.flush()
        except (OSError, ValueError):
            self.handleError(record)


def configure_logging() -> None:
    """Show nemo_rl's records at NRL_LOG_LEVEL (INFO) and everyone else's warnings, on stderr.

    Raises:
        ConfigError: NRL_LOG_LEVEL is not a level.
    """
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
