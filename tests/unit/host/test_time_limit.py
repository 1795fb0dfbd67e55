"""User code that takes too long is stopped."""

import signal
import threading
import time

import pytest

from nemo_rl.host.boundary import time_limit
from nemo_rl.utils.errors import DeadlineExceededError

pytestmark = pytest.mark.fast


def loop(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_loop_ends_at_the_limit_and_no_timer_remains() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DeadlineExceededError, match=r"a loop takes longer than 0\.2 s"), time_limit(0.2, "a loop"):
        loop(30)
    assert signal.getsignal(signal.SIGALRM) is handler
    of_the_test, _ = signal.getitimer(signal.ITIMER_REAL)
    with time_limit(0.2, "a short loop"):
        loop(0.001)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left > 1 or of_the_test == left == 0, "only the alarm of pytest's own time limit is left, if it has one"


def test_an_earlier_alarm_continues() -> None:
    rung: list[float] = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    left, period = signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with time_limit(20, "a short loop"):
            loop(0.1)
        assert rung == [] and 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 2.0
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        loop(0.1)
        assert len(rung) == 1
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, period)


def test_other_threads_run_without_a_limit() -> None:
    done: list[bool] = []

    def work() -> None:
        with time_limit(0.05, "a loop"):
            loop(0.2)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert done == [True]
