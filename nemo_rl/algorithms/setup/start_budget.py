"""Measure the phases of the time between the start of the program and the first step.

    StartBudget(started_at) ─► phase("Ray"), phase("workers") ... ─► add_workers(name, group.start_phases) ─► log

The phases of the run follow each other, so their shares add up. The phases of workers lie within them. Groups of
workers start at the same time, and each line names the slowest worker of a group, because all others wait for it.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nemo_rl.distributed.workers.start_phases import WorkerPhase
from nemo_rl.utils.logger import Logger

logger = logging.getLogger(__name__)

PREFIX = "timing/start"
"""Prefix of the logged metrics."""
_BEFORE = "before setup"
_REST = "the rest"
_MOST_SHOWN = 3
"""Number of phases that the console shows."""
_WORTH_SHOWING_S = 0.1
_FIRST_WAIT_S, _LATER_WAITS_S = 3.0, 15.0
"""Seconds after which the console reports a phase that has not ended, for the first time and after that."""


class StartBudget:
    """Measure the seconds of each phase of a start.

    Args:
        started_at: Value of `time.perf_counter()` at process start, or 0 to count from now.
    """

    def __init__(self, started_at: float) -> None:
        now = time.perf_counter()
        self._started_at = started_at or now
        self._phases: dict[str, float] = {_BEFORE: now - self._started_at} if started_at else {}
        self._workers: list[tuple[str, WorkerPhase]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, which begins when the previous one ends. Log a line if it takes more than a few seconds."""
        began = time.perf_counter()
        waiting = _Waiting(name)
        waiting.start()
        try:
            yield
        finally:
            waiting.ended.set()
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - began

    def add_workers(self, name: str, phases: Sequence[WorkerPhase]) -> None:
        """Add the phases of a group of workers.

        Args:
            name: name of the model, or "generation".
            phases: see `RayWorkerGroup.start_phases`.
        """
        self._workers += [(f"{name}: {phase.name}", phase) for phase in phases]

    def log(self, metrics: Logger) -> None:
        """Log the time of the start, a table of its phases in the log file, and metrics `timing/start/<phase>`."""
        total = time.perf_counter() - self._started_at
        phases = self._phases | {_REST: max(total - sum(self._phases.values()), 0.0)}
        lines = [_line(name, seconds, total) for name, seconds in phases.items()]
        lines += ["  of workers, within these:"] * bool(self._workers)
        for name, phase in self._workers:
            slowest = f"  {phase.worker} on {phase.node}, median {phase.median:.1f}"
            lines.append(_line(f"  {name}", phase.seconds, total) + slowest * (phase.seconds > phase.median))
        longest = sorted(phases.items(), key=lambda phase: -phase[1])[:_MOST_SHOWN]
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest if seconds >= _WORTH_SHOWING_S)
        logger.info(
            "The start took %.1f s%s",
            total,
            f": {shown}." if shown else ".",
            extra={"details": "\n".join(["Of the workers the slowest are named, which the others wait for:", *lines])},
        )
        workers = {name: phase.seconds for name, phase in self._workers}
        named = {f"{name.replace(': ', '/').replace(' ', '_')}": s for name, s in (phases | workers).items()}
        metrics.log_metrics(named | {"total": total}, 0, prefix=PREFIX)


class _Waiting(threading.Thread):
    """Thread that logs that a phase of the start has not ended."""

    def __init__(self, phase: str) -> None:
        super().__init__(name="start-budget", daemon=True)
        self.ended = threading.Event()
        self._phase = phase

    def run(self) -> None:
        """Log a line after a few seconds, and further lines at longer intervals."""
        began = time.perf_counter()
        wait_s = _FIRST_WAIT_S
        while not self.ended.wait(wait_s):
            logger.info("Starting: %s, %.0f s so far.", self._phase, time.perf_counter() - began)
            wait_s = _LATER_WAITS_S


def _line(name: str, seconds: float, total: float) -> str:
    return f"  {name:<34}{seconds:8.1f} s {100 * seconds / max(total, 1e-9):4.0f} %"
