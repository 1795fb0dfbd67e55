"""Write output that training does not depend on: metrics, trackers, conversations.

Invariant: if a disk is full or a tracker does not answer, that output is lost and the run continues.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class OptionalOutput:
    """One destination whose failures cause a single warning.

    Args:
        name: name of the destination in the warning.
        failures: errors that mean that it could not be written.
    """

    def __init__(self, name: str, failures: tuple[type[Exception], ...] = (OSError,)):
        self._name = name
        self._failures = failures
        self._has_warned = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that writes; a later attempt is made even if this one fails."""
        try:
            yield
        except self._failures as error:
            if not self._has_warned:
                logger.warning(
                    "%s cannot be written: %s. Training continues; this output is incomplete.", self._name, error
                )
            self._has_warned = True
