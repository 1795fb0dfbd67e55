"""Tools that tests name by dotted path: honest and hostile ones."""

import os
import time
from typing import Any, Literal

from nemo_rl.kits.tools.interfaces import EpisodeTools


def divide(dividend: float, divisor: float, rounding: Literal["down", "none"] = "none") -> float:
    """Divide two numbers.

    The second paragraph is for people.

    Args:
        dividend: the number above,
            which is divided.
        divisor: the number below.
        rounding: "down" rounds.
    """
    quotient = dividend / divisor
    return float(int(quotient)) if rounding == "down" else quotient


def no_docstring(value: int) -> int:
    return value


def no_hint(value) -> int:  # type: ignore[no-untyped-def]
    """Return the value."""
    return int(value)


def many(*values: int) -> int:
    """Add values."""
    return sum(values)


async def wait(seconds: float) -> str:
    """Wait some time.

    Args:
        seconds: how long.
    """
    import asyncio

    await asyncio.sleep(seconds)
    return "waited"


class Counter(EpisodeTools):
    """A counter for each episode."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.path: str | None = None

    def open(self, metadata: Any) -> None:
        """Remember the path of a file that shows the end of the episode."""
        self.path = metadata.get("path") if metadata else None

    def add(self, amount: int = 1) -> int:
        """Add to the counter.

        Args:
            amount: what is added.
        """
        self.count += amount
        return self.count

    def close(self) -> None:
        """Write the count into the file."""
        if self.path is not None:
            with open(self.path, "w", encoding="utf-8") as file:
                file.write(str(self.count))


class Hostile(EpisodeTools):
    """Everything that a tool should not do."""

    def raise_error(self) -> str:
        """Raise an error."""
        raise RuntimeError("broken")

    def exit(self) -> str:
        """Leave Python."""
        raise SystemExit(3)

    def hang(self) -> str:
        """Never return."""
        time.sleep(3600)
        return "late"

    def not_a_number(self) -> float:
        """Return NaN."""
        return float("nan")

    def surrogate(self) -> str:
        """Return a text that is not valid Unicode."""
        return "a\ud800b"

    def much(self) -> str:
        """Return a hundred million characters."""
        return "x" * 100_000_000

    def print_much(self) -> str:
        """Print 256 MB to both streams of the process, below Python."""
        for _ in range(256):
            os.write(1, b"x" * 2**20)
            os.write(2, b"x" * 2**20)
        return "printed"

    def die(self) -> str:
        """Kill the own process."""
        os.kill(os.getpid(), 9)
        return "alive"

    def fork(self) -> str:
        """Start a process that outlives the call."""
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        return str(child)

    def fill_memory(self) -> str:
        """Allocate 64 GB."""
        return str(len(bytearray(64 * 2**30)))


class Counter2(EpisodeTools):
    """An object that cannot be opened."""

    def open(self, metadata: Any) -> None:
        """Refuse."""
        raise ValueError("not today")

    def add_twice(self) -> int:
        """Add twice."""
        return 2
