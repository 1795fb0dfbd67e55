"""Wait for calls of engine workers on an event loop, without losing calls whose wait is given up.

`engine_group` uses it for its long polls.
"""

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A wait for a call of `collect`, and its start by the loop's clock."""

    future: asyncio.Future[Any]
    since: float


type Waits = dict[int, Wait]
"""Waits by rank."""


class Silence(Exception):  # noqa: N818
    """Raised if a worker of an engine has not answered for too long."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(f"rank {rank} was silent for {seconds:g} s")
        self.rank, self.seconds = rank, seconds


def note_as_seen(wait: asyncio.Future[Any]) -> None:
    """Read the failure of a cancelled wait, so that asyncio does not report it."""
    if not wait.cancelled():
        wait.exception()


def give_up_waits(waits: Waits, _: object = None) -> None:
    """Cancel waits, but not their calls; asyncio would report waits that are pending when the loop closes."""
    for wait in waits.values():
        wait.future.cancel()
    waits.clear()


async def some_answer(waits: Waits, timeout_s: float) -> bool:
    """Wait for some seconds; return whether one of the calls has ended."""
    futures = [wait.future for wait in waits.values()]
    done, _ = await asyncio.wait(futures, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
