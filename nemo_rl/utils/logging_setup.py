"""Console logging of a driver process; `NRL_LOG_LEVEL` sets the level of nemo_rl's own records."""

import logging
import os
import sys


def configure_logging() -> None:
    """Show nemo_rl's records at NRL_LOG_LEVEL (INFO) and everyone else's warnings, on stderr."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("nemo_rl").setLevel(os.environ.get("NRL_LOG_LEVEL", "INFO").upper())
