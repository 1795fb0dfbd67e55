"""Show the progress of a long wait, so that a working run does not seem to hang.

On a terminal the wait has a bar with the time left; elsewhere a line is logged now and then.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from types import TracebackType
from typing import Self

from nemo_rl.host.boundary import in_background
from nemo_rl.host.console_bars import Bar, shows_bars

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
"""Number of seconds between two log lines about one wait."""
SHOWN_AFTER_S = 1.0
"""Number of seconds after which a wait gets a bar."""
_LOOK_EVERY_S = 0.5


class StillWaiting:
    """One wait, during which the caller calls `look` at least once a second. The context manager removes its bar.

    Args:
        what: name of the work that is waited for.
        state: state of the finished parts, for example "workers have answered".
        done: function that returns the number of finished parts, or None if the work has no parts.
        total: number of parts, or None if it is not known.
        unit: name of the parts for the title of the bar, or "" for none.
    """

    def __init__(
        self,
        what: str,
        state: str,
        done: Callable[[], int] | None = None,
        total: int | None = None,
        unit: str = "",
    ) -> None:
        self._what, self._state = what, state
        self._title = f"{what}, {unit}" if unit else what
        self._done, self._total = done, total
        self._began = self._said = time.monotonic()
        self._on_terminal = shows_bars()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def look(self) -> None:
        """Draw the bar again, or log a line if the last one is old enough."""
        now = time.monotonic()
        if self._on_terminal:
            self._draw(now)
        elif now - self._said >= PERIOD_S:
            self._said = now
            logger.info("Still waiting for %s after %.0f s: %s.", self._what, now - self._began, self._described(now))

    def during[T](self, call: Callable[[], T]) -> T:
        """Call a function in a thread, look until it has ended, and return its result or raise its error."""
        running = in_background(call, self._what)
        while not wait([running], timeout=_LOOK_EVERY_S).done:
            self.look()
        return running.result()

    def _draw(self, now: float) -> None:
        if self._bar is None and now - self._began >= SHOWN_AFTER_S:
            self._bar = Bar(self._title, self._total)
        if self._bar is not None and self._done is not None:
            self._bar.show(self._done())

    def _described(self, now: float) -> str:
        """Return the finished parts, and an estimate of the remaining time if some parts are finished."""
        if self._done is None:
            return self._state
        done = self._done()
        if self._total is None:
            return f"{done} {self._state}"
        said = f"{done} of {self._total} {self._state}"
        if not 0 < done < self._total:
            return said
        return f"{said}, about {(now - self._began) / done * (self._total - done):.0f} s left"
