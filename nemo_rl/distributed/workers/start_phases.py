"""Measure the phases of a worker's start, in its process and in the controller.

    worker process   `start_phase("weights")` around the work ─► `taken_phases` ─► answer of `WorkerHost.build`
    controller       answers of all workers ─► `slowest_of` ─► `RayWorkerGroup.start_phases`

Invariant: the seconds of a phase do not include those of phases within it. This file imports neither torch nor Ray.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

PROCESS = "process"
"""Phase from the request of a worker to its first answer."""
ARGUMENTS = "arguments"
"""Phase from the first answer until the worker's class and arguments are received and unpickled."""
IMPORTS = "imports"
CONSTRUCTOR = "constructor"
"""Phase of the constructor, without the phases within it."""

_seconds: dict[str, float] = {}
_within: list[float] = []


@dataclass(frozen=True)
class WorkerPhase:
    """A phase of the start of a worker group."""

    name: str
    """Name of the phase."""
    seconds: float
    """Seconds of the slowest worker."""
    median: float
    """Seconds of the median worker."""
    worker: str
    """Name of the slowest worker."""
    node: str
    """Address of the slowest worker's machine."""


@contextmanager
def start_phase(name: str) -> Iterator[None]:
    """Add the seconds of a block to a phase of this worker's start."""
    began = time.monotonic()
    _within.append(0.0)
    try:
        yield
    finally:
        whole = time.monotonic() - began
        add_phase(name, whole - _within.pop())
        if _within:
            _within[-1] += whole


def add_phase(name: str, seconds: float) -> None:
    """Add seconds to a phase that is not a block of code."""
    _seconds[name] = _seconds.get(name, 0.0) + seconds


def taken_phases() -> dict[str, float]:
    """Return the seconds of each phase since the last call, in the order in which the phases ended."""
    taken = dict(_seconds)
    _seconds.clear()
    return taken


def slowest_of(workers: Sequence[tuple[str, str]], seconds: Sequence[Mapping[str, float]]) -> list[WorkerPhase]:
    """Return each phase with its slowest worker, in the order of the first worker's phases.

    Args:
        workers: name and machine of each worker.
        seconds: seconds of each worker by phase. A worker may lack some phases.
    """
    phases = []
    for name in dict.fromkeys(name for of_worker in seconds for name in of_worker):
        known = [(of_worker[name], *who) for of_worker, who in zip(seconds, workers, strict=True) if name in of_worker]
        longest, worker, node = max(known)
        phases.append(WorkerPhase(name, longest, median(value for value, _, _ in known), worker, node))
    return phases
