"""Writing that training does not depend on: metrics, trackers, conversations.

Invariant: a full disk or a tracker that does not answer costs the numbers that go there, never the run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class OptionalOutput:
    """One destination whose failures are a single warning.

    Args:
        name: what is written, for the warning.
        failures: errors that mean that it could not be written.
    """

    def __init__(self, name: str, failures: tuple[type[Exception], ...] = (OSError,)):
        self._name = name
        self._failures = failures
        self._has_warned = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Write inside; every attempt is made, also after one that failed."""
        try:
            yield
        except self._failures as error:
            if not self._has_warned:
                logger.warning(
                    "%s cannot be written: %s. Training goes on; what is lost stays lost.", self._name, error
                )
            self._has_warned = True
