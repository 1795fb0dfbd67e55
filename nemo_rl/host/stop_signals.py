"""Handles signals that stop a program: it ends immediately, or at its next safe point if there is something to save.

        leave_at_once    from the start of a program
        leave_in_order   instead, in a program that removes what it has half written
        DeferredSignals  during the part that has something to save; the second signal is not deferred
        handlers_kept    around libraries that install their own handlers; result_with_handlers in another thread

Batch systems send SIGUSR1 before a preemption. In the program's process this signal means the same as SIGTERM. Worker
processes do not install these handlers; there SIGUSR1 requests the stacks (`distributed.workers.process`). Invariant: a
signal that is ignored when the program starts (`nohup`, a shell's background job) stays ignored.
"""

import builtins
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
"""Signals within this many seconds count as one: `timeout`, `uv run` and signals to a process group deliver one signal
twice almost at the same time; KubeRay's job end and the hook of its pod send two some seconds apart."""
_RENEWAL_S = 0.05


def leave_at_once() -> None:
    """Let each stop signal end this process immediately with status 128 + its number, without unwinding.

    The kernel ends the child processes of Ray and of this library with it, as after SIGKILL. Only in the main thread.
    """
    _install(_leave)


def _leave(number: int, frame: FrameType | None) -> None:
    _leave_with(128 + number, "nothing more was saved", number, frame)


def _leave_with(status: int, said: str, number: int, frame: FrameType | None) -> None:
    # Do not use `logging`: the signal may have interrupted a record.
    with suppress(OSError):
        os.write(2, f"\n{signal.Signals(number).name}: ended immediately, {said}.\n".encode())
    os._exit(status)


def leave_in_order() -> None:
    """Let the first stop signal end this program with status 128 + its number, after its `finally` blocks.

    Later signals are ignored, so that they do not interrupt these blocks. Call it only in the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        _restore(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN))
        with suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: ended, nothing was kept.\n".encode())
        raise SystemExit(128 + number)

    _install(leave)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of stop signals after a block, even if a library replaced them in C code."""
    before = _handlers()
    try:
        yield
    finally:
        _restore(before)


def result_with_handlers[T](future: Future[T], timeout_s: float) -> T:
    """Wait for a result from another thread whose library may replace the handlers of stop signals.

    The handlers are restored every 50 ms. They act immediately, because this thread waits in Python.

    Raises:
        TimeoutError: no result within `timeout_s` seconds.
        Exception: the future's error.
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


def in_notebook() -> bool:
    """Return whether IPython runs this process, which handles signals itself."""
    return hasattr(builtins, "__IPYTHON__")


class DeferredSignals:
    """Record the first stop signal between `start` and `stop`, instead of ending the process.

    A second signal, or the first one again when the grace time is over, goes to the previous handler. Python handles
    signals only in the main thread; in other threads and in notebooks, this class does nothing.

    Args:
        grace_s: seconds from the first signal within which the safe point must be reached.
        promise: what happens at the safe point, for the log.
    """

    def __init__(self, grace_s: float, promise: str) -> None:
        self.received: signal.Signals | None = None
        """First signal, or None if there was none."""
        self._grace_s = grace_s
        self._promise = promise
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._stopped = threading.Event()

    def start(self) -> Self:
        """Defer signals from now on, except in a notebook, where an interrupt ends the cell at once."""
        if not in_notebook():
            self._before = _handlers()
            _install(self._note)
        return self

    def stop(self) -> None:
        """Restore the previous handlers, after which the grace time no longer has an effect."""
        self._stopped.set()
        _restore(self._before)

    def all_is_saved(self, status: int) -> None:
        """Set the exit status of a signal that ends the process immediately, from now on and also after `stop`."""
        leave = partial(_leave_with, status, "all is saved")
        self._before = {number: leave if handler is _leave else handler for number, handler in self._before.items()}
        _restore(self._before)

    def act_at_once(self) -> None:
        """Pass the received signal to the previous handler, because there is nothing to save."""
        self.stop()
        if self.received is not None:
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            # A separate thread does the logging, because the signal may have interrupted a log record.
            threading.Thread(target=self._watch, name="signal_grace", daemon=True).start()
        elif now - self._received_at > _ONE_REQUEST_S:
            self.received = signal.Signals(number)
            self.act_at_once()

    def _watch(self) -> None:
        """Log what will happen, and send the signal again if the safe point is not reached in time."""
        assert self.received is not None
        name = self.received.name
        logger.warning("%s: %s, within %g s; a second signal ends it immediately.", name, self._promise, self._grace_s)
        if self._stopped.wait(self._grace_s):
            return
        logger.error("%s: the grace time of %g s is over, nothing more is saved.", name, self._grace_s)
        os.kill(os.getpid(), self.received)


def _handlers() -> dict[signal.Signals, Any]:
    """Return the handlers that Python knows, or {} outside the main thread, where they cannot be replaced."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def _install(handler: Callable[[int, FrameType | None], Any]) -> None:
    _restore({number: handler for number, now in _handlers().items() if now != signal.SIG_IGN})


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
