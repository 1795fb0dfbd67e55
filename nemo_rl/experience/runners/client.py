"""Let runner actors sample groups, while the driver's `RolloutRunner` keeps order, deadlines and post-processing.

Each group goes to the runner with the fewest open groups. A runner that dies or hangs is restarted, and its open groups
are sampled again with the same prompts and seeds. Its finished groups are not lost, because the driver owns the
references to their tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.environments.workers.start import Environment
from nemo_rl.environments.workers.supervision import SupervisedActor, answer_of, death_in_short
from nemo_rl.experience.event_loop import BackgroundTask, EventLoopThread
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.progress import GroupProgress
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.runners.actor import RunnerActor, RunnerSettings
from nemo_rl.experience.runners.exchange import GroupExchange
from nemo_rl.experience.runners.groups import GroupTask
from nemo_rl.experience.runners.stored import located, split
from nemo_rl.experience.samples import Closings
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import ConfigError

_MOST_CALLS = 1_000
"""Number of calls that a runner answers concurrently."""
_POLLS_WITHIN_SILENCE = 4
"""Number of answers that a working runner sends within the time limit after which it counts as hung."""


class _NoSignOfLifeError(Exception):
    """A runner's actor did not answer in time."""


def ranks_of_runner(number: int, num_runners: int, num_workers: int, workers_per_engine: int) -> list[int]:
    """Return the ranks of the workers of a runner's engines. The engines are consecutive, so they often share a node.

    Args:
        number: Number of the runner, from 0.
        num_runners: Number of runners, at most the number of engines.
        num_workers: Number of workers of all engines.
        workers_per_engine: Number of workers of each engine (`EngineSettings.num_workers`).
    """
    num_engines = num_workers // workers_per_engine
    first, end = (bound * num_engines // num_runners for bound in (number, number + 1))
    return list(range(first * workers_per_engine, end * workers_per_engine))


@dataclass(eq=False)
class RunnerShare:
    """One runner, which consists of its actor and its engines."""

    name: str
    """Name for logs and errors."""
    engines: EngineGroup
    """All engines of the run."""
    ranks: Sequence[int]
    """Ranks of the workers of its own engines."""
    settings: RunnerSettings
    """Settings of the actor. Each start replaces their engines by the current engines."""
    actor: SupervisedActor = field(init=False)
    """The actor, which is restarted when it dies."""
    exchange: GroupExchange = field(init=False)
    """The groups that the actor samples."""
    _given: list[Any] = field(default_factory=list, init=False)
    """Workers of engines that the running actor uses."""

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
        # # With soft=True, Ray may place an actor without CPUs on any node.
        where: Any = "SPREAD" if process is None else NodeAffinitySchedulingStrategy(process.node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _MOST_CALLS, "scheduling_strategy": where}
        return host.options(**options).remote(replace(self.settings, engines=self._given))

    def _workers(self) -> list[Any]:
        workers = self.engines.workers.workers
        return [workers[rank] for rank in self.ranks]

    async def watch(self) -> None:
        """Keep the actor and its engines running. This coroutine never returns.

        Raises:
            WorkerDiedError: The actor or an engine died too often.
            DeadlineExceededError: An engine does not start in time.
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
                self.actor.end_hung(incarnation, reason)  # on this loop, on which `serve` replaces the actor

    async def _look(self, handle: Any) -> None:
        """Ask the runner for lost engines, and replace them."""
        lost = await self._ask(handle.lost_engines.remote(self._poll_s))
        if lost:
            given = self._given
            workers = await asyncio.to_thread(self._replace_engines, lost, given)
            if self._given is given:  # otherwise a new actor has started with current workers
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
        """Return the seconds after which the actor answers a call even if it has nothing to report."""
        return self._silence_s / _POLLS_WITHIN_SILENCE

    def _replace_engines(self, lost: Sequence[int], given: Sequence[Any]) -> list[Any]:
        """Replace engines unless another thread has already done so, and return the current workers."""
        with self.engines.exclusively():
            now = self._workers()
            found = [self.ranks[position] for position in lost if now[position] is given[position]]
            if found:
                self.engines.replace_engines(found, f"Rollout runner {self.name!r} got no answer from it.")
            return self._workers()


class RemoteRunner(RolloutRunner):
    """A `RolloutRunner` whose groups are sampled by runner actors (`cluster.rollout_runners`).

    Args:
        engines: all engines. The driver sends their weights, and the runners send their requests.
        environments: the driver's environments by task name. They correct rewards of whole collections.
        settings: settings of the runners. Each runner gets its own engines.
        num_runners: number of runner actors.
        loop: event loop for the coroutines.

    Raises:
        ConfigError: there are fewer engines than runners.
    """

    def __init__(
        self,
        engines: EngineGroup,
        environments: Mapping[str, Environment],
        settings: RunnerSettings,
        num_runners: int,
        loop: EventLoopThread,
    ) -> None:
        cluster = settings.cluster
        super().__init__(
            engines, environments, settings.tokenizer, settings.limits, loop, settings.text_rules, cluster.optimizations
        )
        num_workers, size = len(settings.engines), settings.workers_per_engine
        if num_runners > num_workers // size:
            raise ConfigError(
                f"cluster.rollout_runners={num_runners}, but there are {num_workers // size} engines. Each runner "
                f"needs its own engines: use at most {num_workers // size} runners."
            )
        self._reads_collections = settings.reads_collections
        self._runners = [
            RunnerShare(str(number), engines, ranks_of_runner(number, num_runners, num_workers, size), settings)
            for number in range(num_runners)
        ]
        self._tasks: list[BackgroundTask[None]] = []
        for runner in self._runners:
            self._tasks.append(loop.start(runner.watch(), f"the watch over rollout runner {runner.name}"))
            self._tasks.append(loop.start(runner.exchange.serve(), f"the groups of rollout runner {runner.name}"))

    async def _play_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        closings: Closings,
        progress: GroupProgress | None = None,
    ) -> Rollouts:
        """Let a runner sample all answers to one prompt and close their episodes."""
        if any(inputs.images is None for inputs in prompts.get("row_inputs") or ()):
            raise ConfigError(
                "Rollout runners take images but no other inputs next to the tokens. Use cluster.rollout_runners=0."
            )
        runner = min(self._runners, key=lambda each: each.exchange.num_open)
        prompt: Any = BatchedDataDict(prompts.slice(row, row + 1).data)
        rollouts = await runner.exchange.play(GroupTask(prompt, num_generations, sampling, key.of_prompt(row)))
        for sample in rollouts.trajectories:
            sample.group_index = row
        if progress is not None:
            progress.forget()  # a runner samples from the prompt
            progress.rollouts = rollouts
        return rollouts

    def keep(self, rollouts: Rollouts) -> Rollouts:
        """Convert a group of a checkpoint (`RolloutRunner.keep`), whose tokens go to the object store."""
        samples, packed = split([rollouts.trajectories], reads_collections=self._reads_collections)
        return located(Rollouts(samples, rollouts.metrics), ray.put(packed))

    def busy_seconds(self) -> BusySeconds:
        """Return the seconds of work (`RolloutRunner.busy_seconds`) that the runners last reported."""
        engines = [seconds for runner in self._runners for seconds in runner.exchange.busy.engines]
        return BusySeconds(engines, max(runner.exchange.busy.environments for runner in self._runners))

    def shutdown(self, timeout_s: float) -> None:
        """Stop the runners and their environments."""
        for task in self._tasks:
            task.cancel()
        for runner in self._runners:
            runner.actor.shutdown(timeout_s)
