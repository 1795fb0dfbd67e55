"""Limit the time of user-supplied Python code: chat templates and processors may never end.

It uses SIGALRM, which Python handles in the main thread of a process; in other threads there is no limit.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nemo_rl.utils.errors import DeadlineExceededError


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise an error inside the block when it takes longer than the limit.

    An alarm that was set before continues afterwards with its remaining time.

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
