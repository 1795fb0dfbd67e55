"""One asyncio loop in a background thread, on which all rollouts run.

Training code is plain and synchronous; it hands a coroutine to the loop and waits with a deadline. Invariant: the
thread is a daemon and ends with `close`.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any

from nemo_rl.distributed.local_ray import LIVENESS_PERIOD_S, check_local_ray
from nemo_rl.utils.errors import DeadlineExceededError

CLEAN_UP_S = 5.0
"""How long a coroutine that was cancelled may take to end, to close what it opened."""


class EventLoopThread:
    """Runs coroutines from synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine to its end.

        Raises:
            DeadlineExceededError: it takes longer than `timeout_s`; it is cancelled, and awaited for `CLEAN_UP_S`.
            RayDiedError: the local Ray ended; what the coroutine made of it is dropped.
        """
        end = time.monotonic() + timeout_s
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_announced(coroutine, ended), self._loop)
        try:
            while not future.done():
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(f"{phase} did not finish within {timeout_s:g} s.")
                concurrent.futures.wait([future], timeout=min(left, LIVENESS_PERIOD_S))
                check_local_ray()
            return future.result()
        finally:
            if future.cancel():
                ended.wait(CLEAN_UP_S)

    def close(self) -> None:
        """Stop the loop; what still runs on it is dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _announced[T](coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
