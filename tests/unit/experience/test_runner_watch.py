"""The watch over a runner actor, with stand-ins for Ray's handles: who is killed, and what is called again."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from nemo_rl.config import ClusterConfig
from nemo_rl.environments.workers import supervision
from nemo_rl.experience.runners.share import RunnerShare

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]

SILENCE_S = 1.0
SUMMARY = SimpleNamespace(name="summary")


class Handle:
    """Stands in for an actor's handle.

    Args:
        answers: what a method answers at once; other calls stay open until the actor is killed.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = {"ready": "process", **answers}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.open: list[Future[Any]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self.called(method, arguments),
            options=lambda num_returns: SimpleNamespace(
                remote=lambda *arguments: (self.called(method, arguments), "rows")
            ),
        )

    def called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((method, arguments))
        future: Future[Any] = Future()
        if method in self.answers:
            future.set_result(self.answers[method])
        else:
            self.open.append(future)
        return SimpleNamespace(future=lambda: future)

    def die(self) -> None:
        for future in self.open:
            if not future.done():
                future.set_exception(ActorDiedError())


class Engines:
    """Stands in for the driver's engines: four workers."""

    def __init__(self) -> None:
        self.workers = SimpleNamespace(workers=["w0", "w1", "w2", "w3"])
        self.weight_version = 7
        self.replaced: list[list[int]] = []

    def exclusively(self) -> Any:
        return nullcontext()

    def replace_engines(self, ranks: list[int], reason: str) -> None:
        self.replaced.append(ranks)
        for rank in ranks:
            self.workers.workers[rank] = f"new w{rank}"


@pytest.fixture
def share_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunnerShare]:
    """Make a runner with the engines 2 and 3 whose actors are the given ones, one after the other."""
    monkeypatch.setattr(ray, "kill", lambda handle: handle.die())
    monkeypatch.setattr(supervision, "stopped_among", lambda processes: [])
    monkeypatch.setattr(supervision, "end_with_descendants", lambda processes: None)

    def make(engines: Engines, *handles: Handle) -> RunnerShare:
        coming = iter(handles)

        def launch(share: RunnerShare) -> Handle:
            share._given = share._workers()
            return next(coming)

        monkeypatch.setattr(RunnerShare, "_launch", launch)
        cluster = ClusterConfig.build(
            device="cpu", gpus_per_node=0, timeouts={"rollout_runner_silence_s": SILENCE_S}, max_actor_restarts=1
        )
        settings: Any = SimpleNamespace(cluster=cluster, workers_per_engine=1)
        return RunnerShare("0", engines, [2, 3], settings)  # type: ignore[arg-type]

    return make


async def play_watched(share: RunnerShare, engines: Engines) -> Any:
    """Play a group while the watch runs; the weights change after the first call."""
    watch = asyncio.ensure_future(share.watch())
    playing = asyncio.ensure_future(share.play(("prompt",)))
    await asyncio.sleep(0.05)
    engines.weight_version = 8
    played = await asyncio.wait_for(playing, 30)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    return played


async def test_a_runner_without_a_sign_of_life_is_killed_and_its_group_is_played_again(
    share_of: Callable[..., RunnerShare], caplog: pytest.LogCaptureFixture
) -> None:
    engines, hung, next_one = Engines(), Handle(), Handle(play=SUMMARY)
    share = share_of(engines, hung, next_one)
    assert await play_watched(share, engines) == (SUMMARY, "rows")
    assert "The actor of rollout runner '0' ended (no sign of life for 1 s" in caplog.text
    assert ("play", ("prompt", 7)) in hung.calls
    assert ("play", ("prompt", 8)) in next_one.calls
    assert share.actor.num_restarts == 1


async def test_a_death_that_both_see_counts_once(share_of: Callable[..., RunnerShare]) -> None:
    engines, dead, next_one = Engines(), Handle(), Handle(play=SUMMARY)
    share = share_of(engines, dead, next_one)
    asyncio.get_running_loop().call_later(0.1, dead.die)
    assert await play_watched(share, engines) == (SUMMARY, "rows")
    assert share.actor.num_restarts == 1


async def test_an_engine_that_a_runner_has_lost_is_replaced_unless_it_was_already(
    share_of: Callable[..., RunnerShare],
) -> None:
    engines, handle = Engines(), Handle(lost_engines=[1], replace_engines=None)
    share = share_of(engines, handle)
    await share._look(handle)
    assert engines.replaced == [[3]]
    assert handle.calls[-1] == ("replace_engines", (["w2", "new w3"], [1]))
    engines.workers.workers[3] = "newer w3"
    await share._look(handle)
    assert engines.replaced == [[3]], "another thread was first"
    assert handle.calls[-1] == ("replace_engines", (["w2", "newer w3"], [1]))


async def test_a_runner_that_dies_too_often_ends_the_watch(share_of: Callable[..., RunnerShare]) -> None:
    share = share_of(Engines(), Handle(), Handle())
    with pytest.raises(RuntimeError, match="died once more after 1 restarts"):
        await asyncio.wait_for(share.watch(), 30)
