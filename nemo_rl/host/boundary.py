"""Run code of others, which may raise errors of any kind, never end, or need its own thread.

Only this file catches `Exception` and `BaseException`; `tests/unit/test_architecture.py` lists the exceptions to this
rule. Invariant: a cancellation of the task that runs is never caught.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from nemo_rl.utils.errors import DeadlineExceededError


@dataclass
class Boundary[E: BaseException]:
    """Context manager that catches and stores exceptions of type `kind`, and is true after the block if it caught one.

    Each use has a comment that explains why exceptions of any type must be caught there.

    with Boundary(Exception) as caught:  # the verifier may be the user's own code
        return verifier(answer)
    return f"The verifier failed: {caught.take()}"
    """

    kind: type[E]
    """`Exception`, or `BaseException` for code that may also exit or cancel."""
    _error: E | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, place: Any) -> bool:
        if not isinstance(error, self.kind) or _cancels_the_task(error):
            return False
        self._error = error
        return True

    def __bool__(self) -> bool:
        return self._error is not None

    def take(self) -> E:
        """Return the caught error and remove it from this object, because it refers to all variables of the block."""
        error, self._error = self._error, None
        assert error is not None, "the block has raised nothing"
        return error


def _cancels_the_task(error: BaseException) -> bool:
    """Return whether an error cancels the running task, rather than being raised by the user's code."""
    asyncio = sys.modules.get("asyncio")  # slow to import, and the command line imports this file
    if asyncio is None or not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


@contextmanager
def raised_as(named: Callable[[Exception], Exception], *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Replace errors of any kind except `but` by the result of `named`, with the original error as the cause."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        raise named(error) from error


def in_background[T](call: Callable[[], T], name: str) -> Future[T]:
    """Start a call on a daemon thread, which does not keep the process from ending.

    Args:
        name: name of the thread, shown in stacks.
    """
    future: Future[T] = Future()

    def run() -> None:
        with Boundary(BaseException) as caught:  # the caller who waits for the result gets the error
            result = call()
        if caught:
            future.set_exception(caught.take())
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise an error inside the block when it takes longer than the limit.

    It uses SIGALRM, which Python handles in the main thread of a process; in other threads there is no limit. An alarm
    that was set before continues afterwards with its remaining time.

    Args:
        what: name of the limited work, for the message.

    Raises:
        DeadlineExceededError: the block takes longer than the limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise DeadlineExceededError(f"{what} takes longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, expire)
    started = time.monotonic()
    left, period = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), period)
