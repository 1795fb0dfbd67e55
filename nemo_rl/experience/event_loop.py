"""Run all rollouts on an asyncio loop in a background thread.

Training code is synchronous. It passes a coroutine to the loop and waits with a deadline (`run`, `stream`), or starts a
coroutine and continues (`start`):

    training thread                          loop thread
    run / stream ── coroutine ─────────────► runs; cancelled when the caller stops waiting
    start ── coroutine ── BackgroundTask ──► runs on after the call; cancelled by `BackgroundTask.cancel` or `close`
    next wait on the loop ◄── failure ────── a background task failed and its result was not requested

Invariants: the thread is a daemon and ends with `close`. The failure of a background task is raised or logged, with the
name of the task.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from typing import Any, cast

from nemo_rl.distributed.cluster.local_ray import LIVENESS_PERIOD_S, check_local_ray
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.errors import DeadlineExceededError

logger = logging.getLogger(__name__)

_END = object()

CLEAN_UP_S = 5.0
"""Seconds that a cancelled coroutine may take to end and to release its resources."""


class BackgroundTask[T]:
    """A coroutine that runs on the loop independently of the call that started it."""

    def __init__(self, owner: "EventLoopThread", future: "concurrent.futures.Future[T]", name: str):
        self.name = name
        """Name of the task in errors and logs."""
        self._owner = owner
        self.future = future

    @property
    def is_done(self) -> bool:
        """True if the task has finished, failed or been cancelled."""
        return self.future.done()

    @property
    def failure(self) -> BaseException | None:
        """The exception that the coroutine raised. None while it runs, after success and after a cancellation."""
        return self.future.exception() if self.is_done and not self.future.cancelled() else None

    def wait(self, timeout_s: float) -> None:
        """Wait until the coroutine finishes, fails or is cancelled.

        Raises:
            DeadlineExceededError: The task takes longer than `timeout_s`. It continues to run.
            RayDiedError: The local Ray ended.
        """
        self._wait(timeout_s, check_local_ray)

    def result(self, timeout_s: float) -> T:
        """Wait for the end of the coroutine, and return its result.

        Args:
            timeout_s: Time limit of the wait. The task continues to run after it.

        Raises:
            DeadlineExceededError: The task takes longer than `timeout_s`.
            RayDiedError: The local Ray ended.
            concurrent.futures.CancelledError: The task was cancelled.
            Exception: The failure of the coroutine, or of another task whose result was not requested. A note names the
                failed task.
        """
        self._wait(timeout_s, partial(self._owner.check, except_for=self))
        self._owner.note_as_seen(self)
        if self.failure is not None:
            self.failure.add_note(f"Raised by {self.name}.")
        return self.future.result()

    def _wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        end = time.monotonic() + timeout_s
        with StillWaiting(self.name, "it is running") as progress:
            while not self.is_done:
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(f"{self.name} did not finish within {timeout_s:g} s.")
                concurrent.futures.wait([self.future], timeout=min(left, LIVENESS_PERIOD_S))
                check()
                progress.look()
        check()

    def cancel(self) -> None:
        """Request the cancellation of the coroutine, and return before it has ended."""
        self._owner.note_as_seen(self)
        self.future.cancel()


def wait_for_any(tasks: Iterable[BackgroundTask[Any]], timeout_s: float) -> bool:
    """Wait until one of the tasks has ended. Return False if no task has ended after `timeout_s`.

    Raises:
        RayDiedError: the local Ray ended.
    """
    end = time.monotonic() + timeout_s
    futures = [task.future for task in tasks]
    while not any(future.done() for future in futures):
        left = end - time.monotonic()
        if left <= 0:
            return False
        waiting = concurrent.futures.FIRST_COMPLETED
        concurrent.futures.wait(futures, timeout=min(left, LIVENESS_PERIOD_S), return_when=waiting)
        check_local_ray()
    return True


class EventLoopThread:
    """Run coroutines from synchronous code, in a background thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._background: set[BackgroundTask[Any]] = set()
        """Running tasks, and failed tasks whose failure has not been raised yet."""
        self._gate: asyncio.Event | None = None
        """Event for which tasks that are started together wait."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def start[T](self, coroutine: Coroutine[Any, Any, T], name: str) -> BackgroundTask[T]:
        """Run a coroutine in the background.

        `BackgroundTask.result` raises its failure. If the result is not requested, the next wait on this loop raises
        the failure, or `close` logs it.

        Args:
            coroutine: The coroutine. It sets its own deadlines, and `close` cancels it.
            name: Name of the task in errors and logs.
        """
        work = coroutine if self._gate is None else _after(self._gate, coroutine)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        task = BackgroundTask(self, future, name)
        self._background.add(task)
        future.add_done_callback(lambda _: self._forget_if_well(task))
        return task

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Begin all tasks that are started in the `with` block at the same time.

        Their first requests are then sent together. Only one thread may start tasks during the block.
        """
        gate = self._gate = asyncio.Event()
        try:
            yield
        finally:
            self._gate = None
            self._loop.call_soon_threadsafe(gate.set)

    def _forget_if_well(self, task: BackgroundTask[Any]) -> None:
        if task.failure is None:
            self.note_as_seen(task)

    def check(self, except_for: BackgroundTask[Any] | None = None) -> None:
        """Raise the errors that end every wait on this loop.

        Args:
            except_for: Task whose own failure is not raised.

        Raises:
            RayDiedError: The local Ray ended.
            Exception: The failure of a background task whose result was not requested. A note names the task.
        """
        check_local_ray()
        for task in list(self._background):
            if task is not except_for and task.failure is not None:
                self.note_as_seen(task)
                task.failure.add_note(f"Raised by {task.name}, which ran in the background.")
                raise task.failure

    def note_as_seen(self, task: BackgroundTask[Any]) -> None:
        """Remove a background task whose result or failure the caller has received."""
        self._background.discard(task)

    def run[T](self, coroutine: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine to its end, and return its result. Errors are those of `stream`."""

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
        num_expected: int | None = None,
    ) -> Generator[ItemT, None, T]:
        """Run a coroutine, and yield the items that it produces while it runs.

        Args:
            start: Function that makes the coroutine. The coroutine calls the function's argument with each item.
            timeout_s: Time limit of the whole coroutine. After a cancellation, wait `CLEAN_UP_S` for its end.
            describe: Function that describes the pending work. It is called at the deadline.
            num_expected: Number of items for the console. None if unknown.

        Returns:
            The return value of the coroutine.

        Raises:
            DeadlineExceededError: The coroutine takes longer than `timeout_s`. It is cancelled.
            RayDiedError: The local Ray ended. The coroutine's own result or error is discarded.
            Exception: The error of the coroutine, or of a background task (`check`).
        """
        end = time.monotonic() + timeout_s
        ended = threading.Event()
        items = queue.SimpleQueue[Any]()
        future = asyncio.run_coroutine_threadsafe(_announced(start(items.put), ended), self._loop)
        future.add_done_callback(lambda _: items.put(_END))
        num_items = 0
        progress = StillWaiting(phase, "parts are finished", lambda: num_items, num_expected)
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
                        self.check()
                        return future.result()
                    num_items += 1
                    yield item
                progress.look()
                self.check()
        finally:
            progress.end()
            if future.cancel():
                ended.wait(CLEAN_UP_S)

    def close(self) -> None:
        """Cancel all tasks of the loop, stop it, and log failures that were never raised.

        Wait at most `CLEAN_UP_S` for the tasks. A warning names background tasks that do not end.
        """
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        with contextlib.suppress(TimeoutError, RuntimeError):
            ended.result(CLEAN_UP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._log_unseen()

    def _log_unseen(self) -> None:
        tasks, self._background = sorted(self._background, key=lambda task: task.name), set()
        running = [task.name for task in tasks if not task.is_done]
        failed = [task for task in tasks if task.failure is not None]
        if running:
            logger.warning("Background tasks did not end within %g s of the end: %s.", CLEAN_UP_S, ", ".join(running))
        if failed:
            logger.error(
                "%d background tasks failed and their results were not requested: %s. The failure of the first one:",
                len(failed),
                ", ".join(task.name for task in failed),
                exc_info=failed[0].failure,
            )


async def _after[T](gate: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for the event `gate`, then run a coroutine."""
    try:
        await gate.wait()
    except asyncio.CancelledError:
        coroutine.close()
        raise
    return await coroutine


async def _cancel_others() -> None:
    """Cancel all other tasks of the running loop, and wait for their end for half of `CLEAN_UP_S`."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, left = await asyncio.wait(others, timeout=CLEAN_UP_S / 2)
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # disables asyncio's warning


async def _announced[T](coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
