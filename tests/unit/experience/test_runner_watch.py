"""The watch over a runner actor and its groups, with stand-ins for Ray's handles: who is killed, what is sent again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from nemo_rl.config import ClusterConfig
from nemo_rl.environments.workers import supervision
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.runners import exchange as exchange_file
from nemo_rl.experience.runners import groups
from nemo_rl.experience.runners.client import RunnerShare
from nemo_rl.experience.runners.exchange import GroupExchange
from nemo_rl.experience.runners.groups import FinishedGroups, GroupError, OpenGroups
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.utils.errors import WorkerDiedError

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]

SILENCE_S = 1.0
BUSY = BusySeconds([1.0, 3.0], 2.0)
TASK: Any = SimpleNamespace(name="a group")


class Handle:
    """Stands in for an actor's handle.

    Args:
        answers: what a method answers at once, an exception or a function of its arguments; other calls stay open until
            the actor is killed.
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
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif method in self.answers:
            future.set_result(answer)
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


class Player(Handle):
    """Stands in for an actor that plays groups at once: `outcome` makes the outcome of each number."""

    def __init__(self, outcome: Callable[[int], Any]) -> None:
        super().__init__(submit=None)
        self.outcome = outcome
        self.finished: list[tuple[int, Any]] = []
        self.waiting: Future[Any] | None = None

    def called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        answer = super().called(method, arguments)
        if method == "submit":
            self.finished += [(number, self.outcome(number)) for number, _ in arguments[0]]
        if method == "collect":
            self.waiting = self.open[-1]
        if self.finished and self.waiting is not None:
            self.waiting.set_result(FinishedGroups(self.finished, BUSY))
            self.finished, self.waiting = [], None
        return answer


def group(number: int) -> Rollouts:
    return Rollouts([], {"number": float(number)})


@asynccontextmanager
async def served(share: RunnerShare) -> AsyncIterator[GroupExchange]:
    """Serve the groups of a runner while the watch runs."""
    tasks = [asyncio.ensure_future(share.watch()), asyncio.ensure_future(share.exchange.serve())]
    yield share.exchange
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def play_watched(share: RunnerShare, engines: Engines) -> Any:
    """Play a group; the weights change after the first call."""
    async with served(share) as exchange:
        playing = asyncio.ensure_future(exchange.play(TASK))
        await asyncio.sleep(0.05)
        engines.weight_version = 8
        return await asyncio.wait_for(playing, 30)


async def test_a_runner_without_a_sign_of_life_is_killed_and_its_group_is_played_again(
    share_of: Callable[..., RunnerShare], caplog: pytest.LogCaptureFixture
) -> None:
    engines, hung, next_one = Engines(), Handle(), Player(group)
    share = share_of(engines, hung, next_one)
    assert await play_watched(share, engines) == group(0)
    assert "The actor of rollout runner '0' ended (no sign of life for 1 s" in caplog.text
    assert ("submit", ([(0, TASK)], [], 7)) in hung.calls
    assert ("submit", ([(0, TASK)], [], 8)) in next_one.calls
    assert share.actor.num_restarts == 1 and share.exchange.num_open == 0 and share.exchange.busy == BUSY


async def test_a_death_that_both_see_counts_once(share_of: Callable[..., RunnerShare]) -> None:
    engines, dead, next_one = Engines(), Handle(), Player(group)
    share = share_of(engines, dead, next_one)
    asyncio.get_running_loop().call_later(0.1, dead.die)
    assert await play_watched(share, engines) == group(0)
    assert share.actor.num_restarts == 1


async def test_groups_of_one_moment_go_in_one_call(share_of: Callable[..., RunnerShare]) -> None:
    player = Player(group)
    async with served(share_of(Engines(), player)) as exchange:
        played = await asyncio.wait_for(asyncio.gather(*(exchange.play(TASK) for _ in range(20))), 30)
    assert played == [group(number) for number in range(20)]
    submitted = [[number for number, _ in arguments[0]] for method, arguments in player.calls if method == "submit"]
    assert submitted == [list(range(20))]


async def test_the_error_of_a_group_is_raised_for_it_alone(share_of: Callable[..., RunnerShare]) -> None:
    def outcome(number: int) -> Any:
        if number == 0:
            return GroupError.of(ValueError("a reward of text"))
        return GroupError(b"no pickle", "Traceback: of another module") if number == 1 else group(number)

    async with served(share_of(Engines(), Player(outcome))) as exchange:
        played = asyncio.gather(*(exchange.play(TASK) for _ in range(3)), return_exceptions=True)
        first, second, third = await asyncio.wait_for(played, 30)
    assert isinstance(first, ValueError) and str(first) == "a reward of text"
    assert "Raised in a rollout runner:\nValueError: a reward of text" in first.__notes__[0]
    assert isinstance(second, RuntimeError) and "Traceback: of another module" in str(second)
    assert third == group(2)


async def test_a_group_that_nobody_waits_for_is_given_up(share_of: Callable[..., RunnerShare]) -> None:
    handle = Handle(submit=None)
    async with served(share_of(Engines(), handle)) as exchange:
        playing = [asyncio.ensure_future(exchange.play(TASK)) for _ in range(2)]
        await asyncio.sleep(0.1)
        playing[1].cancel()
        await asyncio.sleep(0.1)
        assert exchange.num_open == 1
        playing[0].cancel()
        await asyncio.sleep(0.1)
    submitted = [arguments for method, arguments in handle.calls if method == "submit"]
    assert submitted == [([(0, TASK), (1, TASK)], [], 7), ([], [1], 7), ([], [0], 7)]


async def test_groups_that_a_runner_does_not_accept_fail(share_of: Callable[..., RunnerShare]) -> None:
    async with served(share_of(Engines(), Handle(submit=TypeError("a row that cannot be read")))) as exchange:
        with pytest.raises(TypeError, match="a row that cannot be read"):
            await asyncio.wait_for(exchange.play(TASK), 30)


async def test_a_call_that_did_not_reach_the_actor_is_made_again(
    share_of: Callable[..., RunnerShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_file, "_AGAIN_S", 0.1)
    player = Player(group)
    reached, accepted = player.called, [ActorUnavailableError("no answer", None)]

    def called(method: str, arguments: tuple[Any, ...]) -> Any:
        if method != "submit" or not accepted:
            return reached(method, arguments)
        future: Future[Any] = Future()
        future.set_exception(accepted.pop())
        return SimpleNamespace(future=lambda: future)

    monkeypatch.setattr(player, "called", called)
    async with served(share_of(Engines(), player)) as exchange:
        assert await asyncio.wait_for(exchange.play(TASK), 30) == group(0)


async def test_time_with_work_of_earlier_actors_counts(share_of: Callable[..., RunnerShare]) -> None:
    first, second = Player(group), Player(group)
    share = share_of(Engines(), first, second)
    async with served(share) as exchange:
        await asyncio.wait_for(exchange.play(TASK), 30)
        first.die()
        await asyncio.sleep(0.1)
        await asyncio.wait_for(exchange.play(TASK), 30)
    assert share.actor.num_restarts == 1 and exchange.busy == BUSY + BUSY


async def test_open_groups_fail_with_a_runner_that_dies_too_often(share_of: Callable[..., RunnerShare]) -> None:
    handles = Handle(), Handle()
    share = share_of(Engines(), *handles)
    serving = asyncio.ensure_future(share.exchange.serve())
    playing = asyncio.ensure_future(share.exchange.play(TASK))
    for handle in handles:
        await asyncio.sleep(0.1)
        handle.die()
    with pytest.raises(WorkerDiedError, match="died once more after 1 restarts"):
        await asyncio.wait_for(playing, 30)
    with pytest.raises(WorkerDiedError):
        await asyncio.wait_for(serving, 30)
    with pytest.raises(WorkerDiedError):
        await asyncio.wait_for(share.exchange.play(TASK), 30)


async def test_no_group_waits_after_the_exchange_has_ended(share_of: Callable[..., RunnerShare]) -> None:
    share = share_of(Engines(), Handle(submit=None, collect=ValueError("an answer that cannot be read")))
    with pytest.raises(ValueError, match="cannot be read"):
        await asyncio.wait_for(share.exchange.serve(), 30)
    with pytest.raises(ValueError, match="cannot be read"):
        await asyncio.wait_for(share.exchange.play(TASK), 30)


async def test_a_call_takes_groups_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_TOKENS_OF_A_CALL", 100)
    failure = ValueError("one of them")

    async def play(task: Any) -> Rollouts:
        if task.number == 1:
            raise failure
        if task.number == 9:
            await asyncio.sleep(60)
        return played[task.number]

    played = {number: Rollouts([SimpleNamespace(length=40)], {}) for number in range(5)}  # type: ignore[list-item]
    opened = OpenGroups(play)
    assert await opened.take(0.01) == []
    for number in (0, 1, 2, 3, 4, 9):
        task: Any = SimpleNamespace(number=number, key=SimpleNamespace(phase="train"))
        opened.start(number, task)
    await asyncio.sleep(0.05)
    opened.give_up(9)
    assert await opened.take(1.0) == [
        (0, "train", played[0]),
        (1, "train", failure),
        (2, "train", played[2]),
        (3, "train", played[3]),
    ]
    assert await opened.take(1.0) == [(4, "train", played[4])]
    assert await opened.take(0.01) == []


async def test_a_group_that_was_given_up_before_it_came_is_not_played() -> None:
    async def play(task: Any) -> Rollouts:
        return Rollouts([], {})

    opened = OpenGroups(play)
    opened.give_up(3)
    opened.start(3, TASK)
    assert await opened.take(0.05) == []


async def test_a_group_whose_own_part_is_cancelled_is_answered() -> None:
    async def play(task: Any) -> Rollouts:
        raise asyncio.CancelledError

    opened = OpenGroups(play)
    opened.start(3, SimpleNamespace(key=SimpleNamespace(phase="train")))  # type: ignore[arg-type]
    ((number, _, outcome),) = await opened.take(5.0)
    assert number == 3 and "was cancelled" in str(outcome)


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
    await share._look(handle)
    assert engines.replaced == [[3], [3]], "the newer engine is lost too"


async def test_a_runner_that_dies_too_often_ends_the_watch(share_of: Callable[..., RunnerShare]) -> None:
    share = share_of(Engines(), Handle(), Handle())
    with pytest.raises(RuntimeError, match="died once more after 1 restarts"):
        await asyncio.wait_for(share.watch(), 30)
