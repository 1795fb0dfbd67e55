"""Send groups to a runner actor and collect their results, many groups in each call.

    play() ─► outbox ─► _send (next iteration of the loop, one call) ─► actor.submit
    play() cancelled (deadline, another group failed) ─► _send ─► actor.submit, as given up
    serve ── collect (long poll) ──► finished groups ─► futures of play()
    the actor dies ─► serve: a new one gets all open groups from their start

Invariants: a group has one result, with the same tokens for every actor. The driver owns the references to the tokens,
so they are not lost when the actor dies.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError

from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.environments.workers.supervision import SupervisedActor, death_in_short
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.runners.groups import FinishedGroups, GroupError, GroupTask
from nemo_rl.experience.runners.stored import located
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.host.boundary import Boundary

_AGAIN_S = 1.0
"""Seconds after which a call that did not reach the actor is made again."""


@dataclass(frozen=True)
class _WaitingGroup:
    """A group that has no result yet."""

    task: GroupTask
    future: asyncio.Future[Rollouts]


class GroupExchange:
    """The open groups of one runner, used on one event loop.

    Args:
        weight_version: function that returns the version of the engines' weights.
        poll_s: seconds after which the actor answers `collect` even if no group has finished.
        busy: value of `busy` before the first answer.
    """

    def __init__(
        self, actor: SupervisedActor, weight_version: Callable[[], int], poll_s: float, busy: BusySeconds
    ) -> None:
        self.busy = busy
        """Seconds of work of the runner's engines and environments, from the last report of the runner."""
        self._actor = actor
        self._weight_version = weight_version
        self._poll_s = poll_s
        self._handle: Any = None
        """The running actor. None while it starts."""
        self._numbers = itertools.count()
        self._open: dict[int, _WaitingGroup] = {}
        self._outbox: list[int] = []
        self._given_up: list[int] = []
        self._send_is_due = False
        self._failure: Exception | None = None
        """Error that ended `serve`. None while it runs."""
        self._earlier = busy
        """Seconds of work of earlier actors."""
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Return the number of groups without a result."""
        return len(self._open)

    async def play(self, task: GroupTask) -> Rollouts:
        """Sample a group in the actor. If the actor dies or hangs, a new actor samples the group again.

        Returns:
            The samples, with references to their tokens, and the metrics of environments.

        Raises:
            WorkerDiedError: The actor died too often.
            Exception: Any error of `RolloutRunner.play_group`.
        """
        if self._failure is not None:
            raise self._failure
        self._actor.running()
        number = next(self._numbers)
        waiting = self._open[number] = _WaitingGroup(task, asyncio.get_running_loop().create_future())
        self._outbox.append(number)
        self._send_soon()
        try:
            return await waiting.future
        finally:
            if self._open.pop(number, None) is not None:  # the call was cancelled
                self._given_up.append(number)
                self._send_soon()

    async def serve(self) -> None:
        """Send groups to the actor and collect their results. This coroutine never returns.

        Raises:
            WorkerDiedError: The actor died too often. `play` raises it too, for all open groups.
        """
        try:
            while True:
                incarnation = self._actor.running()
                try:
                    await self._actor.until_ready(incarnation)
                    self._handle, self._outbox = incarnation.handle, list(self._open)
                    self._send()
                    while True:
                        await self._take()
                except (*WORKER_DEATHS, ObjectLostError) as death:
                    self._handle, self._earlier = None, self.busy
                    self._actor.replace(incarnation, death_in_short(death))
        except Exception as failure:
            self._failure = failure
            self._fail(list(self._open), failure)
            raise

    async def _take(self) -> None:
        """Wait for finished groups, and give them to the waiting calls of `play`."""
        collect = self._handle.collect.options(num_returns=2)
        answer, rows = collect.remote(self._poll_s)
        finished: FinishedGroups = await asyncio.wrap_future(answer.future())
        self.busy = self._earlier + finished.busy
        if finished.groups:
            self._actor.note_answer()
        for number, outcome in finished.groups:
            waiting = self._open.pop(number, None)
            if waiting is None or waiting.future.done():
                continue
            if isinstance(outcome, GroupError):
                waiting.future.set_exception(outcome.exception())
            else:
                waiting.future.set_result(located(outcome, rows))

    def _send_soon(self) -> None:
        if not self._send_is_due:
            self._send_is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send new groups, and the numbers of groups that were given up since the last call."""
        self._send_is_due = False
        if self._handle is None:
            return  # `serve` sends all open groups when the actor runs
        given_up, self._given_up = self._given_up, []
        numbers, self._outbox = [number for number in self._outbox if number in self._open], []
        if not numbers and not given_up:
            return
        tasks = [(number, self._open[number].task) for number in numbers]
        with Boundary(Exception) as caught:  # a prompt's row may hold any object
            call = self._handle.submit.remote(tasks, given_up, self._weight_version())
        if caught:
            self._given_up = given_up
            self._fail(numbers, caught.take())
            return
        check = asyncio.get_running_loop().create_task(self._check(call, numbers, given_up))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def _check(self, call: "ray.ObjectRef[None]", numbers: Sequence[int], given_up: Sequence[int]) -> None:
        """Check that the actor accepted a call, or send the call again. `serve` handles a dead actor."""
        with Boundary(Exception) as caught:  # any failure of the call fails its groups
            await asyncio.wrap_future(call.future())
            return
        failure = caught.take()
        if isinstance(failure, ActorUnavailableError):
            await asyncio.sleep(_AGAIN_S)
            self._outbox += numbers
            self._given_up += given_up
            self._send_soon()
        elif not isinstance(failure, WORKER_DEATHS):
            self._fail(numbers, failure)

    def _fail(self, numbers: Sequence[int], failure: Exception) -> None:
        for number in numbers:
            waiting = self._open.pop(number, None)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_exception(failure)
