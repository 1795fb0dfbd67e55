"""Draw the bars of `console_bars` with rich, which is imported only where there is a terminal.

While the display is live, `sys.stderr` is rich's, which prints above the bars, and so is `sys.stdout` if it is a
terminal. Handlers of `logging` that hold the real streams get rich's until the display ends. Invariant: what a program
writes to a pipe or a file never goes to the terminal instead.
"""

import logging
import os
import sys
import threading
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from nemo_rl.host.terminal import is_terminal

_REDRAWS_PER_SECOND = 1
_SPEED_OVER_S = 86400.0
"""Seconds over which the speed is averaged to estimate the time left. With few, slow steps would have no estimate."""
_NARROW = 60
"""Number of columns below which a bar shows only the remaining time."""


class _Console(Console):
    """Console that leaves the cursor visible."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


class LiveDisplay:
    """Live display, which exists as long as there is a bar."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._progress: Progress | None = None
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def add(self, title: str, total: int | None) -> TaskID:
        """Add a bar and return its id."""
        with self._guard:
            if self._progress is None:
                progress, real = _progress(), {name: getattr(sys, name) for name in ("stdout", "stderr")}
                progress.start()
                self._progress = progress
                self._replaced = {name: (stream, getattr(sys, name)) for name, stream in real.items()}
                for stream, shown in self._replaced.values():
                    _hand_over(stream, shown)
            return self._progress.add_task(title, total=total)

    def update(self, bar: TaskID, done: int, total: int | None) -> None:
        """Draw a bar again."""
        with self._guard:
            if self._progress is not None:
                self._progress.update(bar, completed=done, total=total)

    def remove(self, bar: TaskID) -> None:
        """Remove a bar. With the last bar, also remove the display."""
        with self._guard:
            if self._progress is None:
                return
            self._progress.remove_task(bar)
            if not self._progress.tasks:
                ended, self._progress = self._progress, None
                try:
                    ended.stop()
                finally:
                    self._restore()

    def forget(self) -> None:
        """Give a forked child the real streams, because it lacks the drawing thread and the threads that hold locks."""
        self._guard = threading.RLock()
        if self._progress is not None:
            self._progress = None
            self._restore()

    def _restore(self) -> None:
        """Replace the display's streams by the real streams."""
        for name, (stream, shown) in self._replaced.items():
            if getattr(sys, name) is shown:
                setattr(sys, name, stream)
            _hand_over(shown, stream)
        self._replaced = {}


def _hand_over(before: Any, after: Any) -> None:
    """Redirect handlers of `logging` from one stream to another."""
    if before is after or before is None:
        return
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in [handler for one in loggers if isinstance(one, logging.Logger) for handler in one.handlers]:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            # `setStream` would flush, but in a forked child another thread may have held the display's lock.
            handler.stream = after


def _progress() -> Progress:
    column = Column(ratio=2, no_wrap=True, overflow="ellipsis")
    title = TextColumn("{task.description}", markup=False, table_column=column)
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))
    console = _Console(stderr=True, force_terminal=True)
    # A narrow window has no room for both times.
    narrow = console.width < _NARROW
    times: list[ProgressColumn] = (
        [TimeRemainingColumn(compact=True)] if narrow else [TimeElapsedColumn(), TimeRemainingColumn()]
    )
    return Progress(
        *(title, bar, MofNCompleteColumn(), *times),
        console=console,
        transient=True,
        expand=True,
        refresh_per_second=_REDRAWS_PER_SECOND,
        speed_estimate_period=_SPEED_OVER_S,
        redirect_stdout=is_terminal(sys.stdout),
    )


DISPLAY = LiveDisplay()
os.register_at_fork(after_in_child=DISPLAY.forget)
