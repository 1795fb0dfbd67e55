"""The loop of the rollouts ends what still runs on it, and says what a wait is for."""

import asyncio
import gc
import logging
import time

import pytest

from nemo_rl.experience import event_loop
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.utils.errors import DeadlineExceededError


@pytest.fixture
def loop() -> EventLoopThread:
    return EventLoopThread()


async def leave_running(*endless: bool) -> None:
    """Tasks that go on; an endless one does not end when it is cancelled."""

    async def task(is_endless: bool) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if not is_endless:
                    raise

    leave_running.tasks = [asyncio.ensure_future(task(is_endless)) for is_endless in endless]  # type: ignore[attr-defined]
    await asyncio.sleep(0)


def test_tasks_are_cancelled_before_the_loop_ends(
    loop: EventLoopThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is dropped while it waits makes asyncio report that it was destroyed."""
    monkeypatch.setattr(event_loop, "CLEAN_UP_S", 0.5)
    caplog.set_level(logging.DEBUG)
    loop.run(leave_running(False, False, True), 5, "tasks")
    *ended, endless = leave_running.tasks  # type: ignore[attr-defined]
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 3
    assert all(task.cancelled() for task in ended)
    assert not endless.done()
    del endless, ended
    leave_running.tasks = []  # type: ignore[attr-defined]
    gc.collect()
    assert "destroyed" not in caplog.text


def test_the_end_of_the_time_says_what_was_waited_for(loop: EventLoopThread) -> None:
    items = loop.stream(
        lambda hand_over: asyncio.sleep(60), 0.2, "the rollouts", lambda: "engine 3 has 2 requests open"
    )
    with pytest.raises(DeadlineExceededError, match=r"the rollouts did not finish within 0\.2 s\.\nengine 3 has 2"):
        next(items)
    loop.close()
