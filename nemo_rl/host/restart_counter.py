"""Count how often processes had to be started again within an hour."""

import time
from collections import deque
from dataclasses import dataclass, field

_HOUR_S = 3600.0


@dataclass
class RestartCounter:
    """Restarts of the last hour."""

    most: int
    """Largest number of restarts within an hour."""
    _times: deque[float] = field(default_factory=deque)

    def add(self) -> None:
        """Count a restart now."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > _HOUR_S:
            self._times.popleft()

    @property
    def number(self) -> int:
        """Number of restarts within the hour before the last one."""
        return len(self._times)

    @property
    def are_too_many(self) -> bool:
        """True if there were more than are allowed."""
        return self.number > self.most
