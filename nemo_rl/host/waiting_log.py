"""Log a line now and then during a long wait, so that a working run does not seem to hang."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
"""Seconds between two lines about one wait."""


class StillWaiting:
    """One wait, during which the caller calls `look` at least once a second.

    Args:
        what: name of the work that is waited for.
        progress: returns a text about the progress.
    """

    def __init__(self, what: str, progress: Callable[[], str]) -> None:
        self._what, self._progress = what, progress
        self._began = self._said = time.monotonic()

    def look(self) -> None:
        """Log a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._said >= PERIOD_S:
            self._said = now
            logger.info("Still waiting for %s after %.0f s: %s.", self._what, now - self._began, self._progress())
