"""Sets the number of threads on which torch computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_set_num_threads = torch.set_num_threads
"""torch's function, stored before vLLM's CPU worker replaces it by a function that does nothing."""


def set_threads(count: int) -> None:
    """Compute on a number of threads from now on."""
    if count != torch.get_num_threads():
        _set_num_threads(count)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute on a number of threads in this block, and then on as many as before."""
    before = torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)
