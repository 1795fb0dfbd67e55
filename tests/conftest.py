"""Fixtures for all tests: signal handlers as a terminal sets them, and garbage collection in forked processes."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from nemo_rl.host.stop_signals import STOP_SIGNALS, handlers_kept

# Finalizers of Ray objects from earlier tests wait for threads that a forked process does not have.
os.register_at_fork(before=gc.disable, after_in_parent=gc.enable, after_in_child=lambda: (gc.freeze(), gc.enable()))


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Reset signals that `nohup` or a background job ignores, and handlers of other tests."""
    with handlers_kept():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
        yield
