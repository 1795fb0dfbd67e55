"""Calls that run while their caller goes on."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_background[T](call: Callable[[], T], name: str) -> Future[T]:
    """Start a call on a thread of its own, which does not keep the process from ending.

    Args:
        call: what to run.
        name: of the thread, for stacks.

    Returns:
        Its result or error.
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
