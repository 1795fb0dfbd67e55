"""Count what a policy computes in a step, so that a run can report its throughput.

`rank_calls` counts each pass over rows with its time; `algorithms.runtime.throughput` takes the counts once a step.
Invariant: a row counts with its own length, never with padding or filler rows.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl.models.policy.workers.costs import PassCosts

type PassKind = Literal["training", "scoring"]

_MOST_ATTEMPTS = 3
"""A description may take long to fail, so a step does not wait for one again and again."""


@dataclass
class PassWork:
    """The passes of one kind."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a row -> number of such rows of all passes. A model whose counts are never taken, such as a teacher,
    needs no more memory for longer runs."""
    seconds: float = 0.0
    """Time that the passes took."""
    shared_tokens: int = 0
    """Tokens among them that were not computed, because another row of their microbatch has them."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(length * rows for length, rows in self.lengths.items())


class WorkCount:
    """The passes of a policy since they were last taken; threads may count at the same time.

    Args:
        describe: returns what a pass over rows costs; called when it is first needed, and again a few times if it
            could not find out.
    """

    def __init__(self, describe: Callable[[], PassCosts]) -> None:
        self._describe = describe
        self._guard = threading.Lock()
        self._passes = _none()
        self._costs: PassCosts | None = None
        self._attempts = 0

    @property
    def costs(self) -> PassCosts:
        """The cost of a pass over rows."""
        if self._costs is None or (self._costs.is_failure and self._attempts < _MOST_ATTEMPTS):
            self._attempts += 1
            self._costs = self._describe()
        return self._costs

    @contextmanager
    def of(self, kind: PassKind, lengths: Iterable[int] = (), shared_tokens: int = 0) -> Generator[None]:
        """Count the block as passes over rows of these lengths, if it ends without an error; see `PassWork`."""
        started = time.perf_counter()
        yield
        with self._guard:
            work = self._passes[kind]
            work.lengths.update(lengths)
            work.seconds += time.perf_counter() - started
            work.shared_tokens += shared_tokens

    def take(self) -> dict[PassKind, PassWork]:
        """Return what was counted, and start again from nothing."""
        with self._guard:
            taken, self._passes = self._passes, _none()
        return taken


def _none() -> dict[PassKind, PassWork]:
    return {"training": PassWork(), "scoring": PassWork()}
