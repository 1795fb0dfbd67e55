"""A runner actor in the driver: start its process, give it its share of the engines, and replace what dies.

    watch ── lost_engines(poll) ──► runner: answers when an engine is lost, or after `poll`
       no answer in time ─► the runner is killed; a new one plays its open groups again
       an engine is lost ─► it is replaced and gets the current weights ─► replace_engines

Invariant: an engine that a runner reports as lost is replaced once, even if another part finds it dead too.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.environments.workers.supervision import SupervisedActor, answer_of, death_in_short
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.runners.actor import RunnerActor, RunnerSettings
from nemo_rl.experience.runners.exchange import GroupExchange
from nemo_rl.models.generation.engine_group import EngineGroup

_MOST_CALLS = 1_000
"""Calls that a runner answers at the same time."""
_POLLS_WITHIN_SILENCE = 4
"""Number of answers that a working runner gives within the time after which it counts as hung."""


class _NoSignOfLifeError(Exception):
    """A runner's actor did not answer in time."""


def ranks_of_runner(number: int, num_runners: int, num_workers: int, workers_per_engine: int) -> list[int]:
    """Return the ranks of the workers of a runner's engines: consecutive whole engines, often of one node.

    Args:
        number: number of the runner, from 0.
        num_runners: number of runners, at most that of the engines.
        num_workers: number of workers of all engines.
        workers_per_engine: number of workers of each engine (`EngineSettings.num_workers`).
    """
    num_engines = num_workers // workers_per_engine
    first, end = (bound * num_engines // num_runners for bound in (number, number + 1))
    return list(range(first * workers_per_engine, end * workers_per_engine))


@dataclass(eq=False)
class RunnerShare:
    """One runner: its actor and its engines."""

    name: str
    """Name for logs and errors."""
    engines: EngineGroup
    """All engines of the run."""
    ranks: Sequence[int]
    """Ranks of the workers of its own engines."""
    settings: RunnerSettings
    """Settings of the actor; the engines in them are replaced at each start."""
    actor: SupervisedActor = field(init=False)
    """The actor, which is started again when it dies."""
    exchange: GroupExchange = field(init=False)
    """The groups that the actor plays."""
    _given: list[Any] = field(default_factory=list, init=False)
    """Workers that the running actor uses."""

    def __post_init__(self) -> None:
        cluster = self.settings.cluster
        self.actor = SupervisedActor(
            self.name,
            self._launch,
            start_timeout_s=cluster.timeouts.setup_s,
            max_restarts=cluster.max_actor_restarts,
            kind="rollout runner",
        )
        idle = BusySeconds([0.0] * (len(self.ranks) // self.settings.workers_per_engine), 0.0)
        self.exchange = GroupExchange(self.actor, lambda: self.engines.weight_version, self._poll_s, idle)

    def _launch(self) -> Any:
        """Start the actor on the node of its first engine."""
        self._given = self._workers()
        host: Any = ray.remote(RunnerActor)
        process = self.engines.workers.slot(self.ranks[0]).identity
        # With soft=True Ray chooses any node for an actor that reserves no CPU.
        where: Any = "SPREAD" if process is None else NodeAffinitySchedulingStrategy(process.node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _MOST_CALLS, "scheduling_strategy": where}
        return host.options(**options).remote(replace(self.settings, engines=self._given))

    def _workers(self) -> list[Any]:
        workers = self.engines.workers.workers
        return [workers[rank] for rank in self.ranks]

    async def watch(self) -> None:
        """Keep the actor and its engines running; never returns.

        Raises:
            WorkerDiedError: the actor or an engine died too often.
            DeadlineExceededError: an engine does not start in time.
        """
        while True:
            incarnation = self.actor.running()
            try:
                await self.actor.until_ready(incarnation)
                await self._look(incarnation.handle)
            except WORKER_DEATHS as death:
                self.actor.replace(incarnation, death_in_short(death))
            except _NoSignOfLifeError:
                reason = f"no sign of life for {self._silence_s:g} s (cluster.timeouts.rollout_runner_silence_s)"
                self.actor.end_hung(incarnation, reason)  # on this loop, as `serve` replaces the actor here too

    async def _look(self, handle: Any) -> None:
        """Ask the runner for lost engines, and replace them.

        Raises:
            RayActorError, OutOfMemoryError: the actor died.
            _NoSignOfLifeError: it gives no answer.
        """
        lost = await self._ask(handle.lost_engines.remote(self._poll_s))
        if lost:
            given = self._given
            workers = await asyncio.to_thread(self._replace_engines, lost, given)
            if self._given is given:  # otherwise a new actor was started with the workers of that moment
                self._given = workers
            await self._ask(handle.replace_engines.remote(workers, lost))

    async def _ask(self, call: "ray.ObjectRef[Any]") -> Any:
        try:
            return await answer_of(call, self._silence_s)
        except TimeoutError as error:
            raise _NoSignOfLifeError from error

    @property
    def _silence_s(self) -> float:
        return self.settings.cluster.timeouts.rollout_runner_silence_s

    @property
    def _poll_s(self) -> float:
        """Seconds after which the actor answers a call even if it has nothing to report."""
        return self._silence_s / _POLLS_WITHIN_SILENCE

    def _replace_engines(self, lost: Sequence[int], given: Sequence[Any]) -> list[Any]:
        """Replace engines, unless another thread has done so already; return the current workers."""
        with self.engines.exclusively():
            now = self._workers()
            found = [self.ranks[position] for position in lost if now[position] is given[position]]
            if found:
                self.engines.replace_engines(found, f"Rollout runner {self.name!r} got no answer from it.")
            return self._workers()
