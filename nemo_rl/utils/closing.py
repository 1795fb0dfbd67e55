"""Close several things, whatever becomes of each."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any


def close_all(closers: Iterable[Callable[[], Any]]) -> None:
    """Call all closers in order, also those after one that fails; then raise the last failure."""
    with ExitStack() as stack:
        for close in reversed(list(closers)):
            stack.callback(close)
