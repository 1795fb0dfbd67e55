"""Draw the bars of `console_bars` with rich, which is imported only where there is a terminal."""

import threading

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

_REDRAWS_PER_SECOND = 4
_NARROW = 60
"""Columns below which a bar shows only the time left."""


class _Console(Console):
    """A console that leaves the cursor visible."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


class LiveDisplay:
    """The live display; it exists while there is a bar."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._progress: Progress | None = None

    def add(self, title: str, total: int | None) -> TaskID:
        """Add a bar and return its id."""
        with self._guard:
            if self._progress is None:
                self._progress = _progress()
                self._progress.start()
            return self._progress.add_task(title, total=total)

    def update(self, bar: TaskID, done: int, total: int | None) -> None:
        """Draw a bar again."""
        with self._guard:
            if self._progress is not None:
                self._progress.update(bar, completed=done, total=total)

    def remove(self, bar: TaskID) -> None:
        """Remove a bar, and with the last one the display."""
        with self._guard:
            if self._progress is None:
                return
            self._progress.remove_task(bar)
            if not self._progress.tasks:
                ended, self._progress = self._progress, None
                ended.stop()


def _progress() -> Progress:
    column = Column(ratio=2, no_wrap=True, overflow="ellipsis")
    title = TextColumn("{task.description}", markup=False, table_column=column)
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))
    console = _Console(stderr=True)
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
    )


DISPLAY = LiveDisplay()
