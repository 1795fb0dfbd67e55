"""Run coroutines of rollouts in virtual time: the clock jumps to the next event instead of waiting for it.

`VirtualLoop` takes the place of `EventLoopThread`. It runs in the calling thread: the clock moves only while a caller
waits on the loop, so a simulation has the same result each time. Work of the calling thread takes no time; `advance`
lets it take some.
"""

import asyncio
import queue
import selectors
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from nemo_rl.experience import event_loop
from nemo_rl.experience.event_loop import BackgroundTask, EventLoopThread


class _Clock(selectors.SelectSelector):
    """Jumps over each wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None and not super().select(0):
            raise RuntimeError("Everything waits, and no event is scheduled.")
        self.now += max(timeout or 0.0, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class VirtualLoop(EventLoopThread):
    """An event loop without a thread, in virtual seconds; see the module."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop = _Loop()
        self._background: set[BackgroundTask[Any]] = set()

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at a virtual time."""
        return self._loop.call_at(when, callback)

    def advance(self, seconds: float) -> None:
        """Let the caller's work take some time, while the coroutines go on."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def start[T](self, coroutine: Coroutine[Any, Any, T], name: str) -> BackgroundTask[T]:
        """See `EventLoopThread.start`."""
        running: Any = self._loop.create_task(coroutine)
        task = BackgroundTask(self, running, name)
        self._background.add(task)
        running.add_done_callback(lambda _: self._forget_if_well(task))
        return task

    def stream[ItemT, T](
        self,
        start: Callable[[Callable[[ItemT], None]], Coroutine[Any, Any, T]],
        timeout_s: float,
        phase: str,
        describe: Callable[[], str] = str,
        num_expected: int | None = None,
    ) -> Generator[ItemT, None, T]:
        """See `EventLoopThread.stream`; without deadlines."""
        ready: queue.SimpleQueue[ItemT] = queue.SimpleQueue()
        news = asyncio.Event()

        def hand_over(item: ItemT) -> None:
            ready.put(item)
            news.set()

        running = self._loop.create_task(start(hand_over))
        running.add_done_callback(lambda _: news.set())
        while not ready.empty() or not running.done():
            if not ready.empty():
                yield ready.get()
                continue
            news.clear()
            self._loop.run_until_complete(news.wait())
        self.check()
        return running.result()

    def close(self) -> None:
        """Cancel all coroutines."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    @contextmanager
    def used_by_waits(self) -> Iterator[None]:
        """Let waits for background tasks run this loop instead of blocking the thread."""

        def wait(tasks: Iterable[Any], timeout: float | None = None, return_when: str = futures.ALL_COMPLETED) -> None:
            self._loop.run_until_complete(asyncio.wait(list(tasks), timeout=timeout, return_when=return_when))

        module: Any = event_loop
        before = module.concurrent
        module.concurrent = SimpleNamespace(futures=SimpleNamespace(**{**vars(futures), "wait": wait}))
        try:
            yield
        finally:
            module.concurrent = before
