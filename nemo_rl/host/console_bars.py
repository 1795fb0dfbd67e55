"""Show progress bars with the remaining time on a terminal, in one live display with a line for each bar.

Nothing is shown if stderr is not a terminal, or a terminal that cannot move its cursor (TERM=dumb); `waiting_log` then
logs lines. Log records appear above the bars, because the display replaces `sys.stderr` while it is live. Invariant:
the display never hides the cursor, so a killed process leaves the terminal unchanged. Errors of a closed terminal are
never raised. A forked child has no display.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nemo_rl.host.terminal import GONE, is_terminal

_UNUSABLE = ("", "dumb", "unknown")


def shows_bars() -> bool:
    """Return whether this process's stderr is a terminal that can show bars."""
    return is_terminal(sys.stderr) and os.environ.get("TERM", "") not in _UNUSABLE


class Bar:
    """One line of the display. Without a terminal it does nothing.

    Args:
        title: name of the work.
        total: number of its parts, or None if it is not known.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._total = total
        self._id: Any = None
        if shows_bars():
            from nemo_rl.host.live_display import DISPLAY

            self._display = DISPLAY
            with suppress(*GONE):
                self._id = DISPLAY.add(title, total)

    def show(self, done: int) -> None:
        """Show the number of finished parts."""
        if self._id is not None:
            with suppress(*GONE):
                self._display.update(self._id, done, self._total)

    def close(self) -> None:
        """Remove the line."""
        if self._id is not None:
            with suppress(*GONE):
                self._display.remove(self._id)
            self._id = None


@contextmanager
def progress_bar(title: str, total: int | None = None) -> Iterator[Bar]:
    """Show a bar during a block."""
    bar = Bar(title, total)
    try:
        yield bar
    finally:
        bar.close()
