"""Run calls in background threads."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_background[T](call: Callable[[], T], name: str) -> Future[T]:
    """Start a call on a daemon thread, which does not keep the process from ending.

    Args:
        call: function to run.
        name: name of the thread, shown in stacks.

    Returns:
        Future with the call's result or error.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future
