"""A limit on the time that Python code of a user's takes: chat templates and processors may loop for ever.

Works by SIGALRM, which Python gives to the main thread of a process; in other threads there is no limit.
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
    """Raise an error within the block once it takes longer.

    An alarm that was set before goes on afterwards, with the time that is left of it.

    Args:
        seconds: the limit.
        what: what is limited, for the message.

    Raises:
        DeadlineExceededError: the time is up.
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
