"""Measure the shares of time in which the trainer, the engines and the environments are idle."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BusySeconds:
    """Seconds of work since the start of the run."""

    engines: list[float]
    """For each engine, the seconds with an open request, or NaN while the engine does not run."""
    environments: float
    """Seconds in which an environment opened an episode or took a turn."""

    def __add__(self, other: "BusySeconds") -> "BusySeconds":
        engines = [mine + its for mine, its in zip(self.engines, other.engines, strict=True)]
        return BusySeconds(engines, self.environments + other.environments)


@dataclass
class IdleShares:
    """Shares of idle time from step to step."""

    busy: Callable[[], BusySeconds]
    """Function that returns the seconds of work until now."""
    _waited_s: float = field(default=0.0, init=False)
    _last: tuple[float, BusySeconds] = field(init=False)

    def __post_init__(self) -> None:
        self._last = (time.perf_counter(), self.busy())

    @contextmanager
    def trainer_waits(self) -> Generator[None]:
        """Count a block as idle time of the trainer."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - started

    def since_last_call(self) -> dict[str, float]:
        """Return the shares of the time since the last call, from 0 (always busy) to 1, to be logged under `idle/`.

        `trainer` is the share that training waited for weights to be sent or for groups; `engines` is the mean over
        running engines of the share without an open request; `environments` is the share without an open step.
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
