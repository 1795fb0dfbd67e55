"""Close the episodes of one group or collection without delaying its samples.

Invariant: a group or collection waits only for its own episodes.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

CLOSING_S = 30.0
"""Seconds that a group or collection waits for its episodes to be closed; an environment may be busy with a step."""

_late: set[asyncio.Task[None]] = set()
"""Closings that took longer than `CLOSING_S`. Kept here because asyncio holds only weak references to tasks."""


class Closings:
    """Episodes that are being closed.

    Args:
        owner: "group" or "collection", for the log.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, closing: Coroutine[Any, Any, None]) -> None:
        """Start to close an episode. If the environment has nothing to close, the episode is closed on return."""
        task = asyncio.Task(closing, loop=asyncio.get_running_loop(), eager_start=True)
        if not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until all episodes are closed, at most `CLOSING_S`; the remaining ones are closed later."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
        if late:
            _late.update(late)
            for task in late:
                task.add_done_callback(_late.discard)
            logger.warning(
                "%d episodes are not closed %g s after their %s has ended; they are closed when their environment has "
                "time.",
                len(late),
                CLOSING_S,
                self._owner,
            )
