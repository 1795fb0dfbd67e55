"""Say now and then what a long wait is for, so that a run that works is not taken for one that hangs."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
"""Between two lines about one wait."""


class StillWaiting:
    """One wait, which asks `look` at least once a second.

    Args:
        what: is waited for.
        progress: says how far it is.
    """

    def __init__(self, what: str, progress: Callable[[], str]) -> None:
        self._what, self._progress = what, progress
        self._began = self._said = time.monotonic()

    def look(self) -> None:
        """Log a line if it is time for one."""
        now = time.monotonic()
        if now - self._said >= PERIOD_S:
            self._said = now
            logger.info("Still at work on %s, for %.0f s: %s.", self._what, now - self._began, self._progress())
