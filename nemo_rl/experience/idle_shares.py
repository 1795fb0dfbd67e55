"""Measure the shares of time in which the trainer, the engines and the environments are idle."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BusySeconds:
    """Seconds of work since the start of the run, by kind of worker."""

    engines: list[float]
    """Seconds in which each engine had an open request. NaN for an engine that is not running."""
    environments: float
    """Seconds in which an environment opened an episode or took a turn."""

    def __add__(self, other: "BusySeconds") -> "BusySeconds":
        engines = [mine + its for mine, its in zip(self.engines, other.engines, strict=True)]
        return BusySeconds(engines, self.environments + other.environments)


@dataclass
class IdleShares:
    """Compute the shares of idle time between calls."""

    busy: Callable[[], BusySeconds]
    """Function that returns the seconds of work so far."""
    _waited_s: float = field(default=0.0, init=False)
    _last: tuple[float, BusySeconds] = field(init=False)

    def __post_init__(self) -> None:
        self._last = (time.perf_counter(), self.busy())

    @contextmanager
    def trainer_waits(self) -> Generator[None]:
        """Count the time of a block as idle time of the trainer."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - started

    def since_last_call(self) -> dict[str, float]:
        """Return the idle shares of the time since the last call, from 0 (always busy) to 1, logged under `idle/`.

        `trainer` is the share that waits for groups or weight syncs. `engines` is the share without an open request, as
        a mean over running engines. `environments` is the share without an open step.
        """
        now, busy = time.perf_counter(), self.busy()
        since, before = self._last
        seconds = max(now - since, 1e-9)
        shares = {"trainer": self._waited_s / seconds}
        differences = [after - start for after, start in zip(busy.engines, before.engines, strict=True)]
        worked = [difference for difference in differences if not math.isnan(difference)]
        if worked:
            shares["engines"] = 1.0 - sum(worked) / (seconds * len(worked))
        shares["environments"] = 1.0 - (busy.environments - before.environments) / seconds
        self._last, self._waited_s = (now, busy), 0.0
        return {name: min(max(share, 0.0), 1.0) for name, share in shares.items()}
