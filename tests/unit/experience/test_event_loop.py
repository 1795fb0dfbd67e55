"""The loop of the rollouts ends what still runs on it, and says what a wait is for."""

import asyncio
import gc
import logging
import time

import pytest

from nemo_rl.experience import event_loop
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.utils.errors import DeadlineExceededError

pytestmark = pytest.mark.fast


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
    assert time.monotonic() - started < 20, "the tasks would run for minutes"
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


async def fail_after(seconds: float, error: Exception) -> None:
    await asyncio.sleep(seconds)
    raise error


async def double(number: int) -> int:
    await asyncio.sleep(0.05)
    return 2 * number


def test_a_background_task_outlives_the_call_that_started_it(loop: EventLoopThread) -> None:
    task = loop.start(double(4), "doubling")
    assert not task.is_done
    assert loop.run(double(1), 5, "another") == 2
    assert task.result(5) == 8
    with pytest.raises(DeadlineExceededError, match=r"a long sleep did not finish within 0\.1 s"):
        loop.start(asyncio.sleep(60), "a long sleep").result(0.1)
    loop.close()


def test_the_failure_of_a_background_task_is_raised_by_its_result_and_named(loop: EventLoopThread) -> None:
    task = loop.start(fail_after(0, ValueError("no prompt")), "the sampler")
    with pytest.raises(ValueError, match="no prompt") as error:
        task.result(5)
    assert error.value.__notes__ == ["Raised by the sampler."]
    assert loop.run(double(1), 5, "what follows") == 2
    loop.close()


def test_a_failure_that_nobody_asked_for_ends_the_next_wait(loop: EventLoopThread) -> None:
    other = loop.start(asyncio.sleep(60), "a long sleep")
    loop.start(fail_after(0, ValueError("no prompt")), "the sampler").wait(5)
    for wait in (lambda: loop.run(asyncio.sleep(60), 5, "rollouts"), lambda: other.result(5)):
        with pytest.raises(ValueError, match="no prompt") as error:
            wait()
        assert "Raised by the sampler, which ran in the background." in error.value.__notes__
        loop.start(fail_after(0, ValueError("no prompt")), "the sampler").wait(5)
    loop.close()


def test_failures_that_nobody_has_seen_are_logged_at_the_end(
    loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sampler b", "sampler a"):
        loop.start(fail_after(0, ValueError(f"{name} is broken")), name).wait(5)
    loop.close()
    (record,) = caplog.records
    message = "2 background tasks failed and their results were not requested: sampler a, sampler b."
    assert record.getMessage().startswith(message)
    assert record.exc_info is not None and str(record.exc_info[1]) == "sampler a is broken"


def test_the_end_cancels_background_tasks_and_names_those_that_do_not_end(
    loop: EventLoopThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CLEAN_UP_S", 0.5)
    closed = []

    async def sleep() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            closed.append("sleeper")

    async def sleep_whatever_happens() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                closed.append("stubborn")

    loop.start(sleep(), "sleeper"), loop.start(sleep_whatever_happens(), "stubborn")
    cancelled = loop.start(sleep(), "cancelled")
    time.sleep(0.1)
    cancelled.cancel()
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 20, "the tasks would run for minutes"
    assert sorted(closed) == ["sleeper", "sleeper", "stubborn"]
    assert [record.getMessage() for record in caplog.records] == [
        "Background tasks did not end within 0.5 s of the end: stubborn."
    ]


def test_tasks_started_together_begin_in_one_iteration(loop: EventLoopThread) -> None:
    """What they send in their first step goes out in the next one, for all of them at once."""
    started: list[int] = []
    seen: list[int] = []

    async def task(number: int) -> int:
        started.append(number)
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(started)))
        return number

    with loop.together():
        tasks = [loop.start(task(0), "0")]
        time.sleep(0.1)
        assert started == [], "the first one waits for the others"
        tasks += [loop.start(task(number), str(number)) for number in (1, 2)]
    assert [each.result(5) for each in tasks] == [0, 1, 2]
    assert seen == [3, 3, 3]
    assert loop.start(task(3), "alone").result(5) == 3


def test_a_task_that_waits_for_the_others_can_be_cancelled(
    loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """Its coroutine is closed, so that Python does not report that it never ran."""
    with loop.together():
        task = loop.start(asyncio.sleep(0), "never started")
        time.sleep(0.05)
        task.cancel()
        loop.run(asyncio.sleep(0.05), 5, "the cancelling")
    gc.collect()
    assert task.is_done
    loop.close()
    assert "never awaited" not in caplog.text
