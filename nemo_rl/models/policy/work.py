"""Count what a policy computes in a step, so that a run can report its throughput.

`rank_calls` counts each pass over rows with its time; `algorithms.runtime.throughput` takes the counts once a step.
Invariant: a row counts with its own length, never with padding or filler rows.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from nemo_rl.models.policy.workers.costs import PassCosts

type PassKind = Literal["training", "scoring"]


@dataclass
class PassWork:
    """The passes of one kind.

    Attributes:
        lengths: tokens of each row of each pass.
        seconds: time that the passes took.
    """

    lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0


class WorkCount:
    """The passes of a policy since they were last taken; threads may count at the same time.

    Args:
        describe: returns what a pass over rows costs; called once, when it is first needed.
    """

    def __init__(self, describe: Callable[[], PassCosts]) -> None:
        self._describe = describe
        self._guard = threading.Lock()
        self._passes = _none()

    @cached_property
    def costs(self) -> PassCosts:
        """The cost of a pass over rows."""
        return self._describe()

    @contextmanager
    def of(self, kind: PassKind, lengths: Iterable[int] = ()) -> Generator[None]:
        """Count the block as passes over rows of these lengths, if it ends without an error."""
        started = time.perf_counter()
        yield
        with self._guard:
            work = self._passes[kind]
            work.lengths.extend(lengths)
            work.seconds += time.perf_counter() - started

    def take(self) -> dict[PassKind, PassWork]:
        """Return what was counted, and start again from nothing."""
        with self._guard:
            taken, self._passes = self._passes, _none()
        return taken


def _none() -> dict[PassKind, PassWork]:
    return {"training": PassWork(), "scoring": PassWork()}
