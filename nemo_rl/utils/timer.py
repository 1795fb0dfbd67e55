"""Measure phases of a step, and tell a run when its time is over.

Invariant: a label's measurements are kept in order until `reset`.
"""

import statistics
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from nemo_rl.utils.errors import ConfigError

_REDUCTIONS = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "sum": sum,
    "std": statistics.pstdev,
    "count": len,
}


class Timer:
    """Measure phases with named stopwatches, in seconds.

    Args:
        context: facts about the run that are kept with the timer.
    """

    def __init__(self, context: Mapping[str, object] | None = None) -> None:
        self.context = dict(context or {})
        self._running: dict[str, float] = {}
        self._elapsed: dict[str, list[float]] = {}

    def start(self, label: str, should_log: bool = True) -> None:
        """Start a stopwatch. `should_log` has no effect, because nothing is written.

        Raises:
            ValueError: the stopwatch is running already.
        """
        if label in self._running:
            raise ValueError(f"Timer {label!r} is running already; stop it first.")
        self._running[label] = time.perf_counter()

    def stop(self, label: str, should_log: bool = True) -> float:
        """Stop a stopwatch, and store and return the seconds.

        Raises:
            ValueError: the stopwatch is not running.
        """
        if label not in self._running:
            raise ValueError(f"Timer {label!r} is not running; start it first.")
        seconds = time.perf_counter() - self._running.pop(label)
        self.record(label, seconds)
        return seconds

    def record(self, label: str, elapsed: float) -> None:
        """Store a measurement that was made elsewhere."""
        self._elapsed.setdefault(label, []).append(elapsed)

    @contextmanager
    def time(self, label: str, should_log: bool = True) -> Generator[None]:
        """Measure the time of a block, even if the block raises an error."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def get_elapsed(self, label: str) -> list[float]:
        """Return all measurements of a label.

        Raises:
            KeyError: there are none.
        """
        if label not in self._elapsed:
            raise KeyError(f"Nothing was measured as {label!r}; there are {sorted(self._elapsed)}.")
        return self._elapsed[label]

    def get_latest_elapsed(self, label: str) -> float:
        """Return the last measurement of a label."""
        return self.get_elapsed(label)[-1]

    def reduce(self, label: str, operation: str = "mean") -> float:
        """Return one number for a label: mean, median, min, max, sum, std or count.

        Raises:
            ValueError: unknown operation.
        """
        if operation not in _REDUCTIONS:
            raise ValueError(f"Unknown reduction {operation!r}; choose one of {sorted(_REDUCTIONS)}.")
        return float(_REDUCTIONS[operation](self.get_elapsed(label)))  # type: ignore[operator]

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float]:
        """Return one number per label, by one operation or by the operation that `reduction_op` has for the label."""
        if isinstance(reduction_op, str):
            return {label: self.reduce(label, reduction_op) for label in self._elapsed}
        return {label: self.reduce(label, reduction_op.get(label, "mean")) for label in self._elapsed}

    def reset(self, label: str | None = None) -> None:
        """Delete the measurements of one label, or of all labels."""
        if label is None:
            self._elapsed.clear()
            self._running.clear()
        else:
            self._elapsed.pop(label, None)
            self._running.pop(label, None)


class BusyClock:
    """Measure the time during which at least one of several overlapping tasks runs, on one thread."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since = 0.0
        self._before = 0.0

    @contextmanager
    def work(self) -> Generator[None]:
        """Count the time of a block as work."""
        if self._num_running == 0:
            self._since = time.perf_counter()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._before += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Number of seconds with work so far."""
        return self._before + (time.perf_counter() - self._since if self._num_running else 0.0)


def convert_to_seconds(time_string: str) -> int:
    """Convert "DD:HH:MM:SS" to seconds.

    Raises:
        ConfigError: the text has another form.
    """
    parts = time_string.split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise ConfigError(f"A duration is written DD:HH:MM:SS, for example 00:03:45:00; got {time_string!r}.")
    days, hours, minutes, seconds = (int(part) for part in parts)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeoutChecker:
    """Tell a run to save when its wall-clock limit is near.

    Args:
        timeout: limit from now as "DD:HH:MM:SS"; None never expires.
        fit_last_save_time: stop one average iteration early, so that saving still fits.
    """

    def __init__(self, timeout: str | None = "00:03:45:00", fit_last_save_time: bool = False) -> None:
        self._limit_s = None if timeout is None else convert_to_seconds(timeout)
        self._fit_last_save_time = fit_last_save_time
        self._started = time.monotonic()
        self._last_mark: float | None = None
        self._iterations_s: list[float] = []

    def start_iterations(self) -> None:
        """Start measuring iterations."""
        self._last_mark = time.monotonic()

    def mark_iteration(self) -> None:
        """Record the end of an iteration."""
        now = time.monotonic()
        if self._last_mark is not None:
            self._iterations_s.append(now - self._last_mark)
        self._last_mark = now

    def check_save(self) -> bool:
        """Return whether it is time to save and stop."""
        if self._limit_s is None:
            return False
        reserve_s = 0.0
        if self._fit_last_save_time and self._iterations_s:
            reserve_s = statistics.fmean(self._iterations_s)
        return time.monotonic() - self._started + reserve_s >= self._limit_s
