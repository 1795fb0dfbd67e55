"""Signals that ask a program to stop: it ends at once, or at its next safe point where there is something to save.

    leave_at_once       what a program begins with
    DeferredSignals     around the part that has something to save; the second signal is not deferred
    handlers_kept       around libraries that install handlers of their own; result_with_handlers, in another thread

SIGUSR1 is what batch systems send ahead of a preemption; it means the same as SIGTERM here, in the process of the
program. In worker processes, which install none of this, it asks for the stacks (`distributed.workers.process`).
Invariant: a signal that is ignored when the program starts (`nohup`, a shell's background job) stays ignored.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_ONE_REQUEST_S = float(os.environ.get("NRL_ONE_STOP_REQUEST_S", "1"))
"""Signals within this time are one request: `timeout`, `uv run` and signals to a process group deliver one twice at
once, KubeRay's end of a job and the hook of its pod some seconds apart."""
_RENEWAL_S = 0.05


def leave_at_once() -> None:
    """Let each stop signal end this process with status 128 + its number, without unwinding.

    The kernel ends Ray's processes and ours with this one, as after SIGKILL. Only in the main thread.
    """
    _install(_leave)


def _leave(number: int, frame: FrameType | None) -> None:
    _leave_with(128 + number, "nothing more was saved", number, frame)


def _leave_with(status: int, said: str, number: int, frame: FrameType | None) -> None:
    # Not by `logging`: the signal may have come in the middle of a record.
    with suppress(OSError):
        os.write(2, f"\n{signal.Signals(number).name}: ended at once, {said}.\n".encode())
    os._exit(status)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of stop signals back after a block, also where a library replaced them below Python."""
    before = _handlers()
    try:
        yield
    finally:
        _restore(before)


def result_with_handlers[T](future: Future[T], timeout_s: float) -> T:
    """Wait for what another thread does with a library that may replace the handlers of stop signals meanwhile.

    They are put back every 50 ms, and act at once, as this thread waits in Python.

    Raises:
        TimeoutError: no result in `timeout_s` seconds.
        Exception: what the future holds.
    """
    before, end = _handlers(), time.monotonic() + timeout_s
    while True:
        try:
            return future.result(min(_RENEWAL_S, max(end - time.monotonic(), 0.0)))
        except TimeoutError:
            if future.done() or time.monotonic() >= end:
                raise
        finally:
            _restore(before)


class DeferredSignals:
    """From `start` to `stop` the first stop signal is only noted.

    A second one, or the first one again when the grace time is over, goes to the handler that was there before.
    Signals can be handled in the main thread only; elsewhere this does nothing.

    Args:
        grace_s: seconds from the first signal in which the safe point has to come.
        promise: what happens at the safe point, for the log.

    Attributes:
        received: the first signal; None so far.
    """

    def __init__(self, grace_s: float, promise: str) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._promise = promise
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._stopped = threading.Event()

    def start(self) -> Self:
        """Defer from now on."""
        self._before = _handlers()
        _install(self._note)
        return self

    def stop(self) -> None:
        """Put the former handlers back; nothing happens when the grace time ends."""
        self._stopped.set()
        _restore(self._before)

    def all_is_saved(self, status: int) -> None:
        """From now on a signal that would end the program at once ends it with this status, also after `stop`."""
        leave = partial(_leave_with, status, "all is saved")
        self._before = {number: leave if handler is _leave else handler for number, handler in self._before.items()}
        _restore(self._before)

    def act_at_once(self) -> None:
        """Give what was received to the handler that was there before: there is nothing to save."""
        self.stop()
        if self.received is not None:
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            # In a thread of its own, because the signal may have come in the middle of a log record.
            threading.Thread(target=self._watch, name="signal_grace", daemon=True).start()
        elif now - self._received_at > _ONE_REQUEST_S:
            self.received = signal.Signals(number)
            self.act_at_once()

    def _watch(self) -> None:
        """Say what will happen, and send the signal again if the safe point does not come."""
        assert self.received is not None
        name = self.received.name
        logger.warning("%s: %s, within %g s; a second signal ends the run at once.", name, self._promise, self._grace_s)
        if self._stopped.wait(self._grace_s):
            return
        logger.error("%s: the grace time of %g s is over, nothing more is saved.", name, self._grace_s)
        os.kill(os.getpid(), self.received)


def _handlers() -> dict[signal.Signals, Any]:
    """The handlers that Python knows; none outside the main thread, where they cannot be replaced."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def _install(handler: Callable[[int, FrameType | None], Any]) -> None:
    _restore({number: handler for number, now in _handlers().items() if now != signal.SIG_IGN})


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
