"""One asyncio loop in a background thread, on which all rollouts run.

Training code is plain and synchronous; it hands a coroutine to the loop and waits with a deadline. Invariant: the
thread is a daemon and ends with `close`.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast

from nemo_rl.distributed.cluster.local_ray import LIVENESS_PERIOD_S, check_local_ray
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.errors import DeadlineExceededError

_END = object()

CLEAN_UP_S = 5.0
"""How long a coroutine that was cancelled may take to end, to close what it opened."""


class EventLoopThread:
    """Runs coroutines from synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine to its end; errors as `stream`."""

        def start(_: Callable[[None], None]) -> Coroutine[Any, Any, T]:
            return coroutine

        items = self.stream(start, timeout_s, phase)
        try:
            next(items)
        except StopIteration as end:
            return cast("T", end.value)
        raise AssertionError("the coroutine gives no items")

    def stream[ItemT, T](
        self,
        start: Callable[[Callable[[ItemT], None]], Coroutine[Any, Any, T]],
        timeout_s: float,
        phase: str,
        describe: Callable[[], str] = str,
    ) -> Generator[ItemT, None, T]:
        """Run a coroutine, and yield what it hands over on its way.

        Args:
            start: makes the coroutine; it hands an item over by calling the argument.
            timeout_s: limit for all of it. A coroutine that is cancelled is awaited for `CLEAN_UP_S`.
            phase: for the message.
            describe: what is waited for, asked when the time is over.

        Returns:
            What the coroutine returns.

        Raises:
            DeadlineExceededError: it takes longer than `timeout_s`; it is cancelled.
            RayDiedError: the local Ray ended; what the coroutine made of it is dropped.
        """
        end = time.monotonic() + timeout_s
        ended = threading.Event()
        items: queue.SimpleQueue[ItemT] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(_announced(start(items.put), ended), self._loop)
        woken = cast("queue.SimpleQueue[Any]", items)
        future.add_done_callback(lambda _: woken.put(_END))
        num_items = 0
        progress = StillWaiting(phase, lambda: f"{num_items} parts are finished")
        try:
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(
                        f"{phase} did not finish within {timeout_s:g} s.\n{describe()}".rstrip()
                    )
                with contextlib.suppress(queue.Empty):
                    item = items.get(timeout=min(left, LIVENESS_PERIOD_S))
                    if item is _END:
                        check_local_ray()
                        return future.result()
                    num_items += 1
                    yield item
                progress.look()
                check_local_ray()
        finally:
            if future.cancel():
                ended.wait(CLEAN_UP_S)

    def close(self) -> None:
        """Cancel what still runs on the loop and stop it; what does not end by that in time is dropped in silence."""
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        with contextlib.suppress(TimeoutError, RuntimeError):
            ended.result(CLEAN_UP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _cancel_others() -> None:
    """Cancel all tasks of the running loop but this one, and wait for them a moment."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, left = await asyncio.wait(others, timeout=CLEAN_UP_S / 2)
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch for its message


async def _announced[T](coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
