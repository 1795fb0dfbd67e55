"""Boundaries catch errors of any kind, and never the cancellation of the task that runs."""

import asyncio
import gc
import weakref

import pytest

from nemo_rl.host.boundary import Boundary, in_background, raised_as
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast


def test_an_error_ends_at_the_boundary() -> None:
    with Boundary(Exception) as caught:
        raise ValueError("three")
    assert caught
    assert repr(caught.take()) == "ValueError('three')"
    with Boundary(Exception) as nothing:
        pass
    assert not nothing


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_exits_end_only_at_the_boundary_of_all_errors(error: type[BaseException]) -> None:
    with pytest.raises(error), Boundary(Exception):
        raise error
    with Boundary(BaseException) as caught:
        raise error
    assert isinstance(caught.take(), error)


def test_a_task_is_cancelled_through_a_boundary() -> None:
    async def waits() -> str:
        with Boundary(BaseException) as caught:
            await asyncio.sleep(60)
        return f"caught {caught.take()!r}"

    async def cancels_another() -> str:
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        with Boundary(BaseException) as caught:
            await other
        return f"caught {caught.take()!r}"

    async def cancelled() -> None:
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert asyncio.run(cancels_another()) == "caught CancelledError()"


def test_an_error_that_was_taken_keeps_no_variables_alive() -> None:
    class Large:
        pass

    def runs() -> tuple[str, weakref.ref[Large]]:
        large = Large()
        with Boundary(Exception) as caught:
            raise ValueError("three")
        return str(caught.take()), weakref.ref(large)

    gc.disable()
    try:
        text, large = runs()
        assert text == "three" and large() is None
    finally:
        gc.enable()


def test_errors_get_a_name_and_keep_their_cause() -> None:
    with pytest.raises(ConfigError, match="^it is three$") as raised, raised_as(lambda e: ConfigError(f"it is {e}")):
        raise ValueError("three")
    assert isinstance(raised.value.__cause__, ValueError)
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), raised_as(lambda e: ConfigError(f"it is {e}"), but=(OSError,)):
            raise error


def test_the_error_of_a_thread_is_that_of_its_future() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        in_background(leaves, "test").result(10)
    assert in_background(lambda: 3, "test").result(10) == 3
